"""`layerwave select` and `layerwave report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from layerwave.commands.printing import Json, check_out, join, print_json, print_table, table_of
from layerwave.selection.methods import SelectionSettings


@dataclass(frozen=True)
class Select:
    """Choose a layer set from a calibration."""

    calibration: Annotated[Positional[Path], arg(metavar="CALIBRATION")]
    """A file that `layerwave calibrate` wrote."""
    settings: OmitArgPrefixes[SelectionSettings] = SelectionSettings()
    out: Path | None = None
    """The selection.json to write; without it the result is only printed."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import Calibration
        from layerwave.selection import select

        if self.out is not None:
            check_out(self.out, self.calibration)
        selection = select(Calibration.load(self.calibration), self.settings)
        if self.out is not None:
            selection.save(self.out)
        if self.json:
            print(selection.to_json())
            return
        table = table_of(
            "layers", "boundaries", f"{selection.criterion}{' (nats)' * (selection.criterion == 'entropy')}"
        )
        for layers, score in selection.beams[-1]:
            table.add_row(join(layers), join(l + 1 for l in layers), f"{score:.4f}")
        print(f"{selection.method} chose {join(selection.layers)}: outputs of these layers, counted from 0")
        print_table(table)
        if self.out is not None:
            print(f"wrote {self.out}")


@dataclass(frozen=True)
class Report:
    """Write one HTML file: the verdict on a selection, every figure, tables, settings and fingerprints."""

    calibration: Annotated[Positional[Path], arg(metavar="CALIBRATION")]
    """A file that `layerwave calibrate` wrote."""
    selections: Annotated[Positional[tuple[Path, ...]], arg(metavar="[SELECTION ...]")] = ()
    """Files that `layerwave select` wrote, the one to judge first; without any, elsi chooses three layers."""
    out: Path = Path("report.html")
    """The HTML file to write."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import Calibration
        from layerwave.report import write_report
        from layerwave.selection import Selection

        check_out(self.out, self.calibration, *self.selections)
        calibration = Calibration.load(self.calibration)
        write_report(calibration, self.out, [Selection.load(path) for path in self.selections])
        print_json({"out": str(self.out)}) if self.json else print(f"wrote {self.out}")
