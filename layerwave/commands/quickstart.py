"""`layerwave quickstart`."""

from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from layerwave.commands.calibrate import print_summary
from layerwave.commands.printing import Json, join, print_json, print_table, progress_bar, table_of
from layerwave.files.lock import only_run
from layerwave.files.writing import make_folder

FIT_POSITIONS = 1024
"""Half of the default, and a quarter of its time: the quickstart should stay under a minute on two cores."""


@dataclass(frozen=True)
class Quickstart:
    """Calibrate the bundled mini target, run every method for 1, 2 and 3 layers, and draw the wave."""

    out: Path = Path("layerwave-out")
    """Folder for calibration.safetensors, selection.json and wave.png."""
    json: Json = False

    def run(self) -> None:
        make_folder(self.out)
        with only_run(self.out):
            self._run()

    def _run(self) -> None:
        from layerwave.calibration import CalibrationSettings, calibrate
        from layerwave.report import save_figure, wave
        from layerwave.selection import acceptance_study, compare
        from layerwave.targets import load_target

        conversations = resources.files("layerwave") / "assets" / "conversations.jsonl"
        with progress_bar("calibrating mini") as progress:
            settings = CalibrationSettings(fit_positions=FIT_POSITIONS)
            calibration = calibrate(load_target("mini"), str(conversations), settings, progress=progress)
        with progress_bar("predicting acceptance") as progress:
            study = acceptance_study(calibration, progress=progress.sets)
            comparison = compare(calibration, study=study)
        chosen = comparison.chosen("elsi", 3)
        calibration.save(self.out / "calibration.safetensors")
        chosen.save(self.out / "selection.json")
        save_figure(
            wave(calibration, [comparison.chosen(name, 3) for name in ("acceptance", "elsi", "elsi_c", "eagle3")]),
            self.out / "wave.png",
        )
        if self.json:
            print_json(
                {
                    "calibration": calibration.summary,
                    "comparison": [_row(row) for row in comparison.rows],
                    "singles": _singles(calibration, study),
                    "acceptance": study.to_record(),
                }
            )
            return
        print_summary(calibration)
        print_comparison(comparison)
        print_singles(_singles(calibration, study))
        print(f"acceptance is fitted on {FIT_POSITIONS:,} positions here; `layerwave calibrate` takes twice as many\n")
        for title in ("Best set", "Smallest good set", "Beside the entropy"):
            print(f"{title}: {study.readings[title]}")
        print(f"\nwrote {self.out}/calibration.safetensors, {self.out}/selection.json, {self.out}/wave.png")
        print(f"next: layerwave ids {join(chosen.layers)} --num-layers {calibration.num_layers}")


def _row(row) -> dict:
    selection, place = row.selection, row.place
    return {
        "size": len(selection.layers),
        "method": row.name,
        "layers": selection.layers,
        "boundaries": selection.boundaries,
        "entropy_nats": place.score,
        "gap_nats": place.gap,
        "rank": place.rank,
        "of": place.total,
        "acceptance": asdict(row.acceptance) | {"behind": asdict(row.behind)},
    }


def _singles(calibration, study) -> list[dict]:
    import numpy as np

    from layerwave.selection import make_criterion

    _, entropy = make_criterion(calibration, "entropy", 1.0, "raw")
    entropies = entropy(np.arange(calibration.num_layers)[:, None]).tolist()
    best = max(study.singles, key=lambda scored: scored.value)
    return [
        asdict(scored) | {"behind": asdict(study.scores.difference(scored, best)), "entropy_nats": nats}
        for scored, nats in zip(study.singles, entropies, strict=True)
    ]


def print_comparison(comparison) -> None:
    table = table_of(
        "size", "method", "layers", "boundaries", "S_1 (nats)", "gap to best", "rank", "acceptance", "minus the best"
    )
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
            *_accepted(row["acceptance"]),
        )
    print_table(table)
    print("layers: outputs counted from 0; boundary = layer + 1; a single layer is chosen after the middle only")
    print("gap and rank: by S_1; acceptance: of one token of the best linear draft, computed without training")
    print("minus the best: paired over conversations, so its error is smaller; beyond two errors sets are told apart")
    for reason in comparison.unfit:
        print(f"left out: {reason}")


def print_singles(singles: list[dict]) -> None:
    table = table_of("layer", "boundary", "S_1 (nats)", "acceptance", "minus the best", "top-1 agreement")
    for single in singles:
        (layer,) = single["layers"]
        table.add_row(
            str(layer),
            str(layer + 1),
            f"{single['entropy_nats']:.4f}",
            *_accepted(single),
            f"{single['agreement']:.4f}",
        )
    print_table(table)


def _accepted(scored: dict) -> tuple[str, str]:
    behind = "{value:+.4f} ± {standard_error:.4f}".format_map(scored["behind"]) if scored["behind"]["value"] else "best"
    return "{value:.4f} ± {standard_error:.4f}".format_map(scored), behind
