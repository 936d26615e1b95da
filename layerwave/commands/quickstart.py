"""`layerwave quickstart`."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from layerwave.commands.calibrate import print_summary
from layerwave.commands.printing import Json, join, make_folder, print_json, print_table, progress_bar, table_of


@dataclass(frozen=True)
class Quickstart:
    """Calibrate the bundled mini target, run every method for 1, 2 and 3 layers, and draw the wave."""

    out: Path = Path("layerwave-out")
    """Folder for calibration.safetensors, selection.json and wave.png."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import calibrate
        from layerwave.report import save_figure, wave
        from layerwave.selection import compare
        from layerwave.targets import load_target

        make_folder(self.out)
        conversations = resources.files("layerwave") / "assets" / "conversations.jsonl"
        with progress_bar("calibrating mini") as progress:
            calibration = calibrate(load_target("mini"), str(conversations), progress=progress)
        comparison = compare(calibration)
        chosen = comparison.chosen("elsi", 3)
        calibration.save(self.out / "calibration.safetensors")
        chosen.save(self.out / "selection.json")
        save_figure(
            wave(calibration, [comparison.chosen(method, 3) for method in ("elsi", "elsi_c", "eagle3")]),
            self.out / "wave.png",
        )
        if self.json:
            print_json({"calibration": calibration.summary, "comparison": [_row(row) for row in comparison.rows]})
            return
        print_summary(calibration)
        print_comparison(comparison)
        print(f"\nwrote {self.out}/calibration.safetensors, {self.out}/selection.json, {self.out}/wave.png")
        print(f"next: layerwave ids {join(chosen.layers)} --num-layers {calibration.num_layers}")


def _row(row) -> dict:
    selection, place = row.selection, row.place
    return {
        "size": len(selection.layers),
        "method": selection.method,
        "layers": selection.layers,
        "boundaries": selection.boundaries,
        "entropy_nats": selection.score,
        "gap_nats": place.gap,
        "rank": place.rank,
        "of": place.total,
    }


def print_comparison(comparison) -> None:
    table = table_of("size", "method", "layers", "boundaries", "S_1 (nats)", "gap to best", "rank")
    size = 0
    for row in map(_row, comparison.rows):
        if row["size"] != size and size:
            table.add_section()
        size = row["size"]
        table.add_row(
            str(size),
            row["method"],
            join(row["layers"]),
            join(row["boundaries"]),
            f"{row['entropy_nats']:.4f}",
            f"{row['gap_nats']:.4f}",
            f"{row['rank']} of {row['of']}",
        )
    print_table(table)
    print("layers: outputs counted from 0; boundary = layer + 1; a single layer is chosen after the middle only")
    for reason in comparison.unfit:
        print(f"left out: {reason}")
