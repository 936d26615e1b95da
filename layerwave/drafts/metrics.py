"""The run's metrics: one JSON line for each step, layer set and split in `metrics.jsonl`; TensorBoard on request.

A killed run may have written lines of steps that its last checkpoint does not hold. They are dropped on resume, so
that no step stands twice in the file.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from layerwave.errors import LayerwaveError
from layerwave.files.reading import parse_json, shown
from layerwave.files.writing import Lines, whole_file

FILE = "metrics.jsonl"
_REMEDY = "remove the line, or train again"


class MetricsLog:
    """Appends lines to RUN/metrics.jsonl, and scalars to RUN/tensorboard if asked to. A context manager."""

    def __init__(self, run: Path, step: int, *, tensorboard: bool):
        """`step`: steps that the run has behind it; lines of later ones are dropped.

        Raises:
            LayerwaveError: TensorBoard was asked for, and tensorboardX is not installed.
        """
        path = run / FILE
        if path.is_file():
            lines = path.read_bytes().split(b"\n")
            kept = [line for line in lines if line and _step_of(line, str(path)) <= step]
            with whole_file(path) as partial:
                partial.write_bytes(b"".join(line + b"\n" for line in kept))
        self.board = _board(run / "tensorboard", step) if tensorboard else None
        self.lines = Lines(path)

    def __enter__(self) -> "MetricsLog":
        return self

    def write(self, step: int, layers: tuple[int, ...], split: str, values: Mapping[str, Any]) -> None:
        """One line: `split` is train or held_out; values are numbers or lists with one for each step of the test.

        Raises `LayerwaveError` when it cannot be written.
        """
        rounded = {name: _plain(value) for name, value in values.items()}
        self.lines.append(json.dumps({"step": step, "layers": layers, "split": split, **rounded}))
        if self.board is not None:
            for name, value in rounded.items():
                for i, scalar in enumerate(value) if isinstance(value, list) else [("", value)]:
                    self.board.add_scalar(f"{split}/{name}{i}/{'-'.join(map(str, layers))}", scalar, step)

    def commit(self) -> None:
        """Makes sure that what was written survives: called before each checkpoint."""
        self.lines.sync()

    def __exit__(self, *exception: object) -> None:
        self.lines.close()
        if self.board is not None:
            self.board.close()


def read_metrics(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines of RUN/metrics.jsonl, in the order of their steps.

    Raises:
        LayerwaveError: there is no such file, or a line in it is no record (its number is named).
    """
    path = Path(run) / FILE
    if not path.is_file():
        raise LayerwaveError(f"{path} is missing: name the folder of a run of `layerwave train`")
    lines = path.read_bytes().split(b"\n")
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = parse_json(line, where, _REMEDY)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise LayerwaveError(f"{where} is {shown(record)}, expected an object with a step: {_REMEDY}")
    return record


def _step_of(line: bytes, where: str) -> int | float:
    try:
        return _record(line, where)["step"]
    except LayerwaveError:  # the line at which the run was killed
        return float("inf")


def _plain(value: Any) -> float | list[float]:
    """Six significant digits: the lines are read by people as well."""
    return np.vectorize(lambda x: float(f"{x:.6g}"))(np.asarray(value, np.float64)).tolist()


def _board(folder: Path, step: int):
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise LayerwaveError(
            "tensorboard was asked for, but tensorboardX is not installed: pip install 'layerwave[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder), purge_step=step + 1)
