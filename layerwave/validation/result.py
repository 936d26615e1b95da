"""What a validation found: the candidates, how their drafts did, and the file of it all."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerwave.decoding import Evaluation
from layerwave.drafts.config import draft_name
from layerwave.errors import LayerwaveError
from layerwave.files.reading import read_json, shown, typed
from layerwave.files.writing import write_json

SCHEMA, VERSION = "layerwave.validation", 1

Layers = tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A layer set whose draft was trained, or may be."""

    layers: Layers
    """Sorted; 0-based layer outputs."""
    names: tuple[str, ...]
    """Who chose it: methods, fixed rules, `random`, `acceptance_beam`, `given`."""
    scores: Mapping[str, float]
    """By every criterion of the registry, and by the variants of the entropy (see `candidates.scores`)."""
    informativeness: float
    """`Σ w_l S_1(ρ_l)` in nats, see `selection.decompose`."""
    diversity: float
    """`χ = S_1 - informativeness` in nats."""

    @property
    def size(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def boundaries(self) -> Layers:
        """The set as boundaries `b = l + 1`."""
        return tuple(layer + 1 for layer in self.layers)

    @property
    def draft(self) -> str:
        """What its draft is called in folders and evaluations, as `5-23-34`."""
        return draft_name(self.layers)

    @property
    def entropy(self) -> float:
        """`S_1` in nats."""
        return self.scores["entropy"]


@dataclass(frozen=True)
class Standing:
    """One set at one stage of a cascade."""

    layers: Layers
    value: float
    """Acceptance: predicted, or measured on held-out examples; 0 … 1."""
    behind: float
    """Its value minus that of the stage's best."""
    standard_error: float | None
    """Of `behind`; None where nothing tells it."""
    stays: bool
    why: str
    """Why it left or stayed, in words."""


@dataclass(frozen=True)
class Stage:
    """One stage of a cascade: who was compared, by what, and who left."""

    measure: str
    """`predicted acceptance`, or `held-out acceptance` of trained drafts."""
    steps: int
    """Training steps behind each of the drafts; 0 before training."""
    standings: tuple[Standing, ...]
    """Best first."""


@dataclass(frozen=True, repr=False)
class Validation:
    """A finished validation; `evaluations` hold the accepted lengths, `accepted.py` makes statistics of them."""

    target: str
    target_fingerprint: str
    calibration: str
    """`Calibration.fingerprint` of what scored the candidates."""
    data: str
    """Digest of the conversations that trained the drafts."""
    settings: Mapping[str, Any]
    """All settings as JSON."""
    candidates: tuple[Candidate, ...]
    """The sets that were evaluated, in the order of the evaluations' drafts."""
    seeds: tuple[int, ...]
    """Of the drafts' first parameters and the order of the data."""
    evaluations: tuple[Evaluation, ...]
    """One a seed."""
    held_out: tuple[tuple[float, ...], ...]
    """For each seed, first-step acceptance of each candidate's draft on held-out examples; empty without such."""
    notes: tuple[str, ...]
    """What was left out, in words: rules that the target is too shallow for, conversations that share text."""
    stages: tuple[Stage, ...]
    """Of a cascade, in order; empty without one."""
    cost: Mapping[str, int]
    """Draft-steps trained, and what full runs of all sets would have taken."""
    seconds: Mapping[str, float]
    """Wall clock by stage."""

    def __post_init__(self) -> None:
        """Refuses parts that do not belong together: a damaged file, or a fault of the program."""
        drafts = [candidate.draft for candidate in self.candidates]
        whole = (
            bool(drafts)
            and len(self.evaluations) == len(self.seeds) > 0
            and all([found.name for found in evaluation.drafts] == drafts for evaluation in self.evaluations)
            and len({(evaluation.questions, evaluation.ids) for evaluation in self.evaluations}) == 1
            and all(evaluation.settings.trees == self.evaluations[0].settings.trees for evaluation in self.evaluations)
            and len(self.held_out) in (0, len(self.seeds))
            and all(len(row) == len(drafts) for row in self.held_out)
            and all(candidate.scores.keys() == self.candidates[0].scores.keys() for candidate in self.candidates)
        )
        if not whole:
            raise ValueError("evaluations, seeds, candidates and their scores do not fit together")

    def __repr__(self) -> str:
        return f"Validation({len(self.candidates)} layer sets of {self.target}, {len(self.seeds)} seeds)"

    @property
    def record(self) -> dict[str, Any]:
        """What the file holds."""
        content = {name: value for name, value in vars(self).items() if name != "evaluations"}
        content |= {name: [asdict(one) for one in content[name]] for name in ("candidates", "stages")}
        content["evaluations"] = [evaluation.record for evaluation in self.evaluations]
        return json.loads(json.dumps({"schema": SCHEMA, "version": VERSION, **content}))

    def save(self, path: str | Path) -> None:
        """Writes the file, whole or not at all. Raises `LayerwaveError` when it cannot be written."""
        write_json(path, self.record)

    @classmethod
    def load(cls, path: str | Path) -> "Validation":
        """Reads a file that `save` wrote.

        Raises:
            LayerwaveError: it cannot be read, is something else or damaged, or has another version.
        """
        content = read_json(path, "give a file of `layerwave validate`")
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            raise LayerwaveError(f"{path} is not a validation: give a file that `layerwave validate` wrote")
        if (version := content.pop("version", None)) != VERSION:
            raise LayerwaveError(
                f"{path} has schema version {shown(version)}, this layerwave reads {VERSION}: validate again"
            )
        try:
            if isinstance(found := content.get("evaluations"), list):
                content["evaluations"] = [Evaluation.from_record(one, str(path)) for one in found]
            return typed(cls, content, "validation")
        except (LayerwaveError, ValueError) as error:
            raise LayerwaveError(f"{path} is damaged ({error}): validate again") from None
