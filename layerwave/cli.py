"""The command line: parse, call, print. One dataclass a command; its fields are the flags."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg, subcommand

from layerwave.calibration.settings import CalibrationSettings
from layerwave.errors import LayerwaveError
from layerwave.selection.methods import SelectionSettings
from layerwave.targets import DTypeName

Json = FlagCreatePairsOff[Annotated[bool, arg(help="Print the result as JSON instead of a table.")]]


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

        _make_folder(self.out)
        conversations = resources.files("layerwave") / "assets" / "conversations.jsonl"
        with _progress("calibrating mini") as progress:
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
            _print_json({"calibration": calibration.summary, "comparison": [_row(row) for row in comparison.rows]})
            return
        _print_summary(calibration)
        _print_comparison(comparison)
        print(f"\nwrote {self.out}/calibration.safetensors, {self.out}/selection.json, {self.out}/wave.png")
        print(f"next: layerwave ids {_join(chosen.layers)} --num-layers {calibration.num_layers}")


@dataclass(frozen=True)
class Calibrate:
    """Run a target over conversations once and keep the block sums of every layer in one file."""

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """Directory in Hugging Face format, hub id, or mini (the bundled model)."""
    conversations: Annotated[Positional[Path], arg(metavar="CONVERSATIONS")]
    """ShareGPT JSON or JSONL, OpenAI-style messages, or lines of {"text": ...}."""
    out: Path
    """The .safetensors file to write."""
    settings: OmitArgPrefixes[CalibrationSettings] = CalibrationSettings()
    dtype: DTypeName = "float32"
    """Parameters and activations; norms, softmax and sums are float32 in any case."""
    batch_tokens: int = 2048
    """Tokens in a batch, padding included: memory and speed, not the result."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import calibrate, read_conversations
        from layerwave.targets import load_target

        _check_out(self.out, self.conversations)
        conversations = read_conversations(self.conversations)
        target = load_target(self.target, self.dtype)
        with _progress(f"calibrating {self.target}") as progress:
            calibration = calibrate(
                target, conversations, self.settings, batch_tokens=self.batch_tokens, progress=progress
            )
        _write_calibration(calibration, self.out, self.json)


@dataclass(frozen=True)
class Merge:
    """Join calibrations of disjoint conversations, made with the same target and settings."""

    parts: Annotated[Positional[tuple[Path, ...]], arg(metavar="CALIBRATION ...")]
    """Two or more files that `layerwave calibrate` wrote."""
    out: Path
    """The .safetensors file to write."""
    without_replicates: FlagCreatePairsOff[bool] = False
    """Leave out the bootstrap replicates, whose sums have to be in every part to be merged."""
    json: Json = False

    def run(self) -> None:
        from layerwave.calibration import Calibration

        _check_out(self.out, *self.parts)
        if len(self.parts) < 2:
            raise LayerwaveError(f"{len(self.parts)} calibration to merge: name at least two")
        parts = [Calibration.load(part) for part in self.parts]
        if self.without_replicates:
            parts = [part.without_replicates() for part in parts]
        calibration = Calibration.merge(parts)
        _write_calibration(calibration, self.out, self.json)


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
            _check_out(self.out, self.calibration)
        selection = select(Calibration.load(self.calibration), self.settings)
        if self.out is not None:
            selection.save(self.out)
        if self.json:
            print(selection.to_json())
            return
        table = _table("layers", "boundaries", f"{selection.criterion}{' (nats)' * (selection.criterion == 'entropy')}")
        for layers, score in selection.beams[-1]:
            table.add_row(_join(layers), _join(l + 1 for l in layers), f"{score:.4f}")
        print(f"{selection.method} chose {_join(selection.layers)}: outputs of these layers, counted from 0")
        _print_table(table)
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

        _check_out(self.out, self.calibration, *self.selections)
        calibration = Calibration.load(self.calibration)
        write_report(calibration, self.out, [Selection.load(path) for path in self.selections])
        _print_json({"out": str(self.out)}) if self.json else print(f"wrote {self.out}")


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

        rows = layer_ids_table(_parse_layers(self.layers), self.num_layers)
        if self.json:
            _print_json([dataclasses.asdict(row) for row in rows])
            return
        table = _table("consumer", "ids", "an id names", "note")
        for row in rows:
            names = "output of layer id" if row.reads == "output" else "boundary: input of layer id"
            table.add_row(row.title, "refused" if row.ids is None else _join(row.ids), names, row.refusal or row.note)
        _print_table(table)


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices and memory, and say so when an accelerator lies unused."""

    json: Json = False

    def run(self) -> None:
        from layerwave.doctor import examine

        report = examine()
        if self.json:
            _print_json(dataclasses.asdict(report))
            return
        table = _table("what", "found")
        for name, found in (*report.versions.items(), *report.devices.items(), *report.memory.items()):
            table.add_row(name, found)
        _print_table(table)
        for warning in report.warnings:
            print(f"WARNING: {warning}", file=sys.stderr)


Command = (
    Annotated[Quickstart, subcommand("quickstart")]
    | Annotated[Calibrate, subcommand("calibrate")]
    | Annotated[Merge, subcommand("merge")]
    | Annotated[Select, subcommand("select")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Ids, subcommand("ids")]
    | Annotated[Doctor, subcommand("doctor")]
)


def main(args: list[str] | None = None) -> None:
    """Entry point of `layerwave`. Exit codes: 0, 2 for what the user can mend (one line on stderr), 130 interrupted."""
    try:
        # Parsing builds the settings, which refuse values out of range.
        command = tyro.cli(
            Command,
            args=args,
            prog="layerwave",
            description="Measure which layers of a target a speculative-decoding draft should read.",
        )
        command.run()
    except LayerwaveError as error:
        print(f"layerwave: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("layerwave: interrupted; nothing half-written was left", file=sys.stderr)
        sys.exit(130)


def _parse_layers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise LayerwaveError(
            f"layers {text!r} are not whole numbers between commas; write for example 5,23,35"
        ) from None


def _check_out(out: Path, *inputs: Path) -> None:
    """Refuses before the long work what could not, or should not, be written after it."""
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise LayerwaveError(f"{out} cannot be written: name a file in a folder that exists and is writable")
    if out.exists() and any(path.exists() and path.samefile(out) for path in inputs):
        raise LayerwaveError(f"{out} is an input as well and would be lost: give another --out")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayerwaveError(f"{path} cannot be made a folder ({error.strerror}); give another --out") from None


def _progress(title: str):
    from layerwave.progress import Progress

    return Progress(title)


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


def _write_calibration(calibration, out: Path, as_json: bool) -> None:
    calibration.save(out)
    if as_json:
        _print_json({"out": str(out), **calibration.summary})
        return
    _print_summary(calibration)
    print(f"wrote {out}")


def _print_summary(calibration) -> None:
    print(f"{calibration!r}")
    print("; ".join(f"{count:,} {what}" for what, count in calibration.summary.items() if count))


def _print_comparison(comparison) -> None:
    table = _table("size", "method", "layers", "boundaries", "S_1 (nats)", "gap to best", "rank")
    size = 0
    for row in map(_row, comparison.rows):
        if row["size"] != size and size:
            table.add_section()
        size = row["size"]
        table.add_row(
            str(size),
            row["method"],
            _join(row["layers"]),
            _join(row["boundaries"]),
            f"{row['entropy_nats']:.4f}",
            f"{row['gap_nats']:.4f}",
            f"{row['rank']} of {row['of']}",
        )
    _print_table(table)
    print("layers: outputs counted from 0; boundary = layer + 1; a single layer is chosen after the middle only")
    for reason in comparison.unfit:
        print(f"left out: {reason}")


def _table(*columns: str):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_table(table) -> None:
    from rich.console import Console

    terminal = Console(highlight=False)
    # Without a terminal rich assumes 80 columns and would fold; a file takes lines of any length.
    console = terminal if terminal.is_terminal else Console(highlight=False, width=200)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def _join(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
