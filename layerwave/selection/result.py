"""The result of a selection, and its file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from layerwave.errors import LayerwaveError
from layerwave.files.reading import parse_json, read_json, shown, typed
from layerwave.files.writing import whole_file
from layerwave.selection.sets import check_layers, join

SCHEMA = "layerwave.selection"
VERSION = 1

Layers = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Selection:
    """A chosen layer set, and the beams it was chosen from.

    Attributes:
        method: `elsi`, `elsi_c`, `exhaustive`, `low_entropy`, or the name of a fixed rule.
        layers: the set, sorted; 0-based layer outputs.
        score: the criterion's value for the set (entropy: nats).
        num_layers: number of the target's layers, N.
        calibration: fingerprint of what it was chosen from (`Calibration.fingerprint`).
        criterion: what was scored: `entropy`, or the name of the user's own function.
        settings: the options of the method, as given.
        beams: for each depth, the kept sets and their scores, best first. A search has one depth a set size; the
            exhaustive search and the fixed rules have the last one alone.
        parents: for each set of `beams`, the places in the beam before it from which the set was reached (the
            edges of the paper's Fig. 7); empty at the first depth.
        warnings: what was warned of while it was chosen.
    """

    method: str
    layers: Layers
    score: float
    num_layers: int
    calibration: str
    criterion: str = "entropy"
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    beams: tuple[tuple[tuple[Layers, float], ...], ...] = ()
    parents: tuple[tuple[tuple[int, ...], ...], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def boundaries(self) -> Layers:
        """The set as boundaries `b = l + 1`: 0 is the embedding, N the last output before the final norm."""
        return tuple(layer + 1 for layer in self.layers)

    def __repr__(self) -> str:
        return (
            f"Selection({self.method}: layers {join(self.layers)} of 0 … {self.num_layers - 1}, "
            f"boundaries {join(self.boundaries)}, {self.criterion} {self.score:.4f})"
        )

    def __str__(self) -> str:
        lines = [repr(self), f"{'layers':>16} {'boundaries':>16} {self.criterion:>10}"]
        for layers, score in self.beams[-1] if self.beams else ():
            boundaries = join(layer + 1 for layer in layers)
            lines.append(f"{join(layers):>16} {boundaries:>16} {score:>10.4f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks: what `str` says, as a table."""
        rows = "".join(
            f"<tr><td>{join(layers)}</td><td>{join(l + 1 for l in layers)}</td><td>{score:.4f}</td></tr>"
            for layers, score in (self.beams[-1] if self.beams else ())
        )
        head = f"<tr><th>layers</th><th>boundaries</th><th>{escape(self.criterion)}</th></tr>"
        return f"<table><caption>{escape(repr(self))}</caption>{head}{rows}</table>"

    def to_json(self) -> str:
        """The selection as JSON text, with the version of its schema."""
        # JSON has no infinity; alpha may be infinite.
        settings = {key: "inf" if value == math.inf else value for key, value in self.settings.items()}
        beams = [
            [
                {"layers": layers, "score": score, "parents": parents}
                for (layers, score), parents in zip(beam, edges, strict=True)
            ]
            for beam, edges in zip(self.beams, self.parents, strict=True)
        ]
        record = {
            "schema": SCHEMA,
            "version": VERSION,
            "method": self.method,
            "criterion": self.criterion,
            "num_layers": self.num_layers,
            "calibration": self.calibration,
            "layers": self.layers,
            "boundaries": self.boundaries,
            "score": self.score,
            "settings": settings,
            "warnings": self.warnings,
            "beams": beams,
        }
        return json.dumps(record, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, source: str = "selection") -> "Selection":
        """Read what `to_json` wrote; `source` names the text in errors.

        Raises `LayerwaveError` for text that is not JSON, is not a selection, has another version, or contradicts
        itself.
        """
        return cls._from_record(parse_json(text, source, "select again"), source)

    @classmethod
    def _from_record(cls, record: object, source: str) -> "Selection":
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise LayerwaveError(f"{source} is not a selection: expected the file that `layerwave select` writes")
        if record.get("version") != VERSION:
            raise LayerwaveError(
                f"{source} has schema version {shown(record.get('version'))}, this layerwave reads {VERSION}: select "
                "again"
            )
        try:
            found = typed(_Record, {key: record[key] for key in record.keys() - {"schema", "version"}}, "selection")
            return found.selection()
        except LayerwaveError as error:
            raise LayerwaveError(f"{source} is damaged ({error}): select again") from None

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file, whole or not at all."""
        with whole_file(path) as partial:
            partial.write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Selection":
        """Read a file that `save` wrote. Raises `LayerwaveError` as `from_json` does, or when it cannot be read."""
        return cls._from_record(read_json(path, "give a selection file"), str(path))


@dataclass(frozen=True)
class _Node:
    """A kept set, as the file has it."""

    layers: Layers
    score: float
    parents: tuple[int, ...]


@dataclass(frozen=True)
class _Record:
    """The file without its schema and version."""

    method: str
    criterion: str
    num_layers: int
    calibration: str
    layers: Layers
    boundaries: Layers
    score: float
    settings: dict[str, int | float | str | bool]
    beams: tuple[tuple[_Node, ...], ...]
    warnings: tuple[str, ...] = ()

    def selection(self) -> Selection:
        """Raises `LayerwaveError` for what contradicts itself."""
        layers = check_layers(self.layers, self.num_layers)
        if self.boundaries != tuple(layer + 1 for layer in layers):
            raise LayerwaveError(
                f"boundaries are {list(self.boundaries)}, but the layers {list(layers)}, one less each"
            )
        nodes = [node for beam in self.beams for node in beam]
        if not all(math.isfinite(score) for score in [self.score, *(node.score for node in nodes)]):
            raise LayerwaveError("a score is not finite")
        sizes = [0, *map(len, self.beams)]
        for before, beam in zip(sizes, self.beams, strict=False):
            if not beam or any(not 0 <= parent < before for node in beam for parent in node.parents):
                raise LayerwaveError(f"a beam is empty, or names parents beyond the {before} sets of the one before it")
            if before and not all(node.parents for node in beam):
                raise LayerwaveError("a set was reached from no set of the beam before it")
        if self.beams and layers not in [tuple(sorted(node.layers)) for node in self.beams[-1]]:
            raise LayerwaveError(f"the last beam does not hold the layers {list(layers)}")
        return Selection(
            method=self.method,
            layers=layers,
            score=self.score,
            num_layers=self.num_layers,
            calibration=self.calibration,
            criterion=self.criterion,
            settings={key: math.inf if value == "inf" else value for key, value in self.settings.items()},
            beams=tuple(
                tuple((check_layers(node.layers, self.num_layers), node.score) for node in beam) for beam in self.beams
            ),
            parents=tuple(tuple(node.parents for node in beam) for beam in self.beams),
            warnings=self.warnings,
        )


def as_beam(sets: np.ndarray, scores: np.ndarray) -> tuple[tuple[Layers, float], ...]:
    """Rows of sets and their scores, as a `Selection` holds them."""
    return tuple((tuple(row), score) for row, score in zip(sets.tolist(), scores.tolist(), strict=True))
