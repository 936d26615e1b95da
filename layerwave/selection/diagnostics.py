"""All that is asked of a selection before it is trusted, in one call; what does not fit the data says why."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import comb
from typing import TypeAlias

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.cka_floor import CkaFloor, cka_floor
from layerwave.selection.decomposition import Decomposition, decompose
from layerwave.selection.gains import MarginalGains, marginal_gains
from layerwave.selection.methods import settings_of
from layerwave.selection.overlap import BeamOverlap, beam_overlap
from layerwave.selection.result import Selection
from layerwave.selection.sensitivity import SensitivityTable, sensitivity
from layerwave.selection.sinks import SinkDominance, sink_dominance
from layerwave.selection.stability import Stability, stability

MOST_SETS = {"acceptance": 300}
"""Sets of one size that are ranked at most, by criterion: about a minute on two cores."""
MOST_SETS_ELSEWHERE = 100_000
"""The same for criteria that score block sums: about 10 s."""

Part: TypeAlias = Stability | BeamOverlap | Decomposition | MarginalGains | SinkDominance | SensitivityTable | CkaFloor

TITLES = {
    "stability": "Stability",
    "overlap": "Fixed rules",
    "decomposition": "Informativeness and diversity",
    "gains": "Gain of each layer",
    "sinks": "Sinks and norms",
    "sensitivity": "Sensitivity",
    "cka": "CKA",
}


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """The diagnostics of one selection, each None where it could not be computed: `missing` says why.

    Each part has its own `reading`.
    """

    stability: Stability | None = None
    overlap: BeamOverlap | None = None
    decomposition: Decomposition | None = None
    gains: MarginalGains | None = None
    sinks: SinkDominance | None = None
    sensitivity: SensitivityTable | None = None
    cka: CkaFloor | None = None
    missing: tuple[tuple[str, str], ...] = ()
    """Title of a part, and the reason why it is None."""

    @property
    def readings(self) -> dict[str, str]:
        """One sentence a part, by its title."""
        return {title: part.reading for title, part in self._parts.items()}

    @property
    def warnings(self) -> dict[str, str]:
        """The readings of the parts that warn."""
        return {title: part.reading for title, part in self._parts.items() if _warns(part)}

    @property
    def _parts(self) -> dict[str, Part]:
        parts = {TITLES[field.name]: getattr(self, field.name) for field in fields(self) if field.name in TITLES}
        return {title: part for title, part in parts.items() if part is not None}


def _warns(part: Part) -> bool:
    match part:
        case SinkDominance():
            return part.warning
        case SensitivityTable():
            return bool(part.changed_by)
        case CkaFloor():
            return part.saturated
    return False


def diagnose(
    calibration: Calibration,
    selection: Selection,
    others: Sequence[Calibration] = (),
    *,
    beside: Sequence[Selection] = (),
    seed: int = 0,
) -> Diagnostics:
    """Every diagnostic of a selection from `calibration`; one that does not fit the data is left out and says why.

    Args:
        calibration: what the selection was made from.
        selection: its criterion must have a registered name: most parts run the method again.
        others: calibrations of the same samples with another final state or rho; they fill the sensitivity table.
        beside: selections whose sets are wanted in the stability's table too.
        seed: of the permutations of the CKA floor.
    """

    def resampled() -> Stability:
        s = settings_of(selection)
        if s.criterion != "entropy":
            raise LayerwaveError(f"replicates are scored by entropy alone, not by {s.criterion}")
        options = {name: getattr(s, name) for name in ("expand", "pool", "alpha", "weighting", "estimator")}
        sets = [other.layers for other in beside]
        return stability(calibration, s.size, s.method, s.beam, **options, sets=sets)

    def ranked() -> BeamOverlap:
        sets = comb(calibration.num_layers, len(selection.layers))
        if sets > MOST_SETS.get(selection.criterion, MOST_SETS_ELSEWHERE):
            raise LayerwaveError(
                f"{sets:,} sets of this size are too many to rank by {selection.criterion} here: call beam_overlap"
            )
        return beam_overlap(calibration, selection)

    compute = {
        "stability": resampled,
        "overlap": ranked,
        "decomposition": lambda: decompose(calibration, selection.layers, weighting=settings_of(selection).weighting),
        "gains": lambda: marginal_gains(calibration, selection),
        "sinks": lambda: sink_dominance(calibration, settings_of(selection)),
        "sensitivity": lambda: sensitivity([calibration, *others], settings_of(selection)),
        "cka": lambda: cka_floor(calibration, seed=seed),
    }
    found, missing = {}, []
    for name, part in compute.items():
        try:
            found[name] = part()
        except LayerwaveError as error:
            missing.append((TITLES[name], str(error)))
    return Diagnostics(**found, missing=tuple(missing))
