"""What the report says first: the set, whether to trust it, and the numbers to paste."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import TypeAlias, TypeVar

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection import (
    BeamOverlap,
    CkaFloor,
    Decomposition,
    MarginalGains,
    Selection,
    SensitivityTable,
    SinkDominance,
    beam_overlap,
    cka_floor,
    decompose,
    marginal_gains,
    sensitivity,
    settings_of,
    sink_dominance,
)
from layerwave.selection.stability import Stability, stability

MOST_SETS = 100_000
"""Sets that a report ranks at most (about 10 s on a CPU)."""

Part = TypeVar("Part")
Reading: TypeAlias = BeamOverlap | Decomposition | MarginalGains | SinkDominance | SensitivityTable | CkaFloor


@dataclass
class Findings:
    """The diagnostics of one selection, each None where it could not be computed; `missing` says why."""

    stability: Stability | None = None
    overlap: BeamOverlap | None = None
    decomposition: Decomposition | None = None
    gains: MarginalGains | None = None
    sinks: SinkDominance | None = None
    sensitivity: SensitivityTable | None = None
    cka: CkaFloor | None = None
    missing: list[tuple[str, str]] = field(default_factory=list)
    """Name of a part, and the reason why the report has none."""

    @property
    def warnings(self) -> list[str]:
        """Sentences of the parts that warn; stability is said apart, unless it is unknown."""
        unknown = [
            f"How far the choice depends on the samples is unknown: {why}"
            for part, why in self.missing
            if part == "Stability"
        ]
        return unknown + [part.reading for part in self._parts.values() if _warns(part)]

    @property
    def readings(self) -> list[tuple[str, str]]:
        """Name and sentence of the parts that do not warn."""
        return [(name, part.reading) for name, part in self._parts.items() if not _warns(part)]

    @property
    def _parts(self) -> dict[str, Reading]:
        parts = {
            "Fixed rules": self.overlap,
            "Informativeness and diversity": self.decomposition,
            "Gain of each layer": self.gains,
            "Sinks and norms": self.sinks,
            "Sensitivity": self.sensitivity,
            "CKA": self.cka,
        }
        return {name: part for name, part in parts.items() if part is not None}


def _warns(part: Reading) -> bool:
    match part:
        case SinkDominance():
            return part.warning
        case SensitivityTable():
            return bool(part.changed_by)
        case CkaFloor():
            return part.saturated
    return False


def examine(calibration: Calibration, selection: Selection, others: Sequence[Selection] = ()) -> Findings:
    """Runs every diagnostic; one that does not fit the data is left out and says why.

    `others` are selections whose sets are wanted in the bootstrap table too.
    """
    findings = Findings()

    def attempt(name: str, compute: Callable[[], Part]) -> Part | None:
        try:
            return compute()
        except LayerwaveError as error:
            findings.missing.append((name, str(error)))
            return None

    def overlap() -> BeamOverlap:
        sets = comb(calibration.num_layers, len(selection.layers))
        if sets > MOST_SETS:
            raise LayerwaveError(f"{sets:,} sets of this size are too many to rank for a report: use rank_among_all")
        return beam_overlap(calibration, selection)

    def resampled() -> Stability:
        s = settings_of(selection)
        if s.criterion != "entropy":
            raise LayerwaveError(f"replicates are scored by entropy alone, not by {s.criterion}")
        options = {name: getattr(s, name) for name in ("expand", "pool", "alpha", "weighting", "estimator")}
        sets = [other.layers for other in others]
        return stability(calibration, s.size, s.method, s.beam, **options, sets=sets)

    findings.stability = attempt("Stability", resampled)
    findings.overlap = attempt("Fixed rules", overlap)
    findings.decomposition = attempt(
        "Informativeness and diversity",
        lambda: decompose(calibration, selection.layers, weighting=settings_of(selection).weighting),
    )
    findings.gains = attempt("Gain of each layer", lambda: marginal_gains(calibration, selection))
    findings.sinks = attempt("Sinks and norms", lambda: sink_dominance(calibration, settings_of(selection)))
    findings.sensitivity = attempt("Sensitivity", lambda: sensitivity([calibration], settings_of(selection)))
    findings.cka = attempt("CKA", lambda: cka_floor(calibration))
    return findings
