"""`layerwave select` and `layerwave report`."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from layerwave.commands.printing import Json, check_out, join, print_json, print_table, progress_bar, table_of
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
        calibration = Calibration.load(self.calibration)
        by_acceptance = self.settings.criterion == "acceptance"
        if by_acceptance:
            print("scoring layer sets by acceptance, about 0.3 s each on two cores …", file=sys.stderr, flush=True)
        selection = select(calibration, self.settings)
        if self.out is not None:
            selection.save(self.out)
        kept = _with_errors(calibration, selection) if by_acceptance else []
        if self.json:
            record = json.loads(selection.to_json())
            print_json(record | {"acceptance": kept} if by_acceptance else record)
            return
        print(f"{selection.method} chose {join(selection.layers)}: outputs of these layers, counted from 0")
        print_table(_acceptance_table(kept) if by_acceptance else _score_table(selection))
        if self.out is not None:
            print(f"wrote {self.out}")


def _score_table(selection):
    table = table_of("layers", "boundaries", f"{selection.criterion}{' (nats)' * (selection.criterion == 'entropy')}")
    for layers, score in selection.beams[-1]:
        table.add_row(join(layers), join(l + 1 for l in layers), f"{score:.4f}")
    return table


def _with_errors(calibration, selection) -> list[dict]:
    """Predicted acceptance of the sets that were kept last, and how far each is from the choice."""
    from layerwave.selection import AcceptanceScores

    scores = AcceptanceScores(calibration, selection.settings["weighting"])
    chosen = scores[selection.layers]
    return [
        asdict(scored) | {"behind": asdict(apart), "told_apart": apart.told_apart}
        for scored in (scores[layers] for layers, _ in selection.beams[-1])
        for apart in [scores.difference(scored, chosen)]
    ]


def _acceptance_table(kept: list[dict]):
    table = table_of("layers", "boundaries", "acceptance", "minus the choice", "told apart", "top-1 agreement")
    for scored in kept:
        table.add_row(
            join(scored["layers"]),
            join(l + 1 for l in scored["layers"]),
            "{value:.4f} ± {standard_error:.4f}".format_map(scored),
            "{value:+.4f} ± {standard_error:.4f}".format_map(scored["behind"]),
            "yes" if scored["told_apart"] else "no",
            f"{scored['agreement']:.4f}",
        )
    return table


@dataclass(frozen=True)
class Report:
    """Write one HTML file: the verdict on a selection, every figure, tables, settings and fingerprints."""

    calibration: Annotated[Positional[Path], arg(metavar="CALIBRATION")]
    """A file that `layerwave calibrate` wrote."""
    selections: Annotated[Positional[tuple[Path, ...]], arg(metavar="[SELECTION ...]")] = ()
    """Files that `layerwave select` wrote, the one to judge first; without any, elsi chooses three layers."""
    validation: Path | None = None
    """A validation.json that `layerwave validate` wrote from this calibration: adds what drafts of many sets did."""
    out: Path = Path("report.html")
    """The HTML file to write."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import Calibration
        from layerwave.report import write_report
        from layerwave.selection import Selection
        from layerwave.validation import Validation

        check_out(self.out, self.calibration, *self.selections, *([self.validation] if self.validation else []))
        calibration = Calibration.load(self.calibration)
        selections = [Selection.load(path) for path in self.selections]
        validation = Validation.load(self.validation) if self.validation else None
        with progress_bar(f"writing {self.out}") as progress:
            write_report(calibration, self.out, selections, validation, progress=progress.sets)
        print_json({"out": str(self.out)}) if self.json else print(f"wrote {self.out}")
