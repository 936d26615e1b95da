"""`layerwave ids` and `layerwave doctor`."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from layerwave.commands.printing import Json, join, parse_layers, print_json, print_table, table_of


@dataclass(frozen=True)
class Ids:
    """Print the numbers that each tool wants in its config for a set of layers."""

    layers: Annotated[Positional[str], arg(metavar="LAYERS")]
    """Layer outputs counted from 0, as layerwave prints them: 5,23,35."""
    num_layers: int
    """Number of the target's layers."""
    json: Json = False

    def run(self) -> None:
        from layerwave.interop import layer_ids_table

        rows = layer_ids_table(parse_layers(self.layers), self.num_layers)
        if self.json:
            print_json([dataclasses.asdict(row) for row in rows])
            return
        table = table_of("consumer", "ids", "an id names", "note")
        for row in rows:
            names = "output of layer id" if row.reads == "output" else "boundary: input of layer id"
            table.add_row(row.title, "refused" if row.ids is None else join(row.ids), names, row.refusal or row.note)
        print_table(table)


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices and memory, and say so when an accelerator lies unused."""

    json: Json = False

    def run(self) -> None:
        from layerwave.doctor import examine

        report = examine()
        if self.json:
            print_json(dataclasses.asdict(report))
            return
        table = table_of("what", "found")
        for name, found in (*report.versions.items(), *report.devices.items(), *report.memory.items()):
            table.add_row(name, found)
        print_table(table)
        for warning in report.warnings:
            print(f"WARNING: {warning}", file=sys.stderr)
