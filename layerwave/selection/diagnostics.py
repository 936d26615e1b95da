"""All that is asked of a selection before it is trusted, in one call."""

from collections.abc import Sequence
from dataclasses import dataclass

from layerwave.calibration import Calibration
from layerwave.selection.cka_floor import CkaFloor, cka_floor
from layerwave.selection.decomposition import Decomposition, decompose
from layerwave.selection.gains import MarginalGains, marginal_gains
from layerwave.selection.methods import settings_of
from layerwave.selection.overlap import BeamOverlap, beam_overlap
from layerwave.selection.result import Selection
from layerwave.selection.sensitivity import SensitivityTable, sensitivity
from layerwave.selection.sinks import SinkDominance, sink_dominance


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """The diagnostics of one selection; each part has its own `reading`."""

    overlap: BeamOverlap
    decomposition: Decomposition
    gains: MarginalGains
    sinks: SinkDominance
    sensitivity: SensitivityTable
    cka: CkaFloor

    @property
    def readings(self) -> tuple[str, ...]:
        """One sentence a part."""
        parts = (self.overlap, self.decomposition, self.gains, self.sinks, self.sensitivity, self.cka)
        return tuple(part.reading for part in parts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The readings of the parts that warn."""
        return (self.sinks.reading,) * self.sinks.warning + (self.cka.reading,) * self.cka.saturated


def diagnose(
    calibration: Calibration, selection: Selection, others: Sequence[Calibration] = (), *, seed: int = 0
) -> Diagnostics:
    """Every diagnostic of a selection from `calibration`.

    Args:
        calibration: what the selection was made from.
        selection: its criterion must have a registered name: most parts run the method again.
        others: calibrations of the same samples with another final state or rho; they fill the sensitivity table.
        seed: of the permutations of the CKA floor.

    Raises:
        LayerwaveError: as each part does.
    """
    settings = settings_of(selection)
    return Diagnostics(
        overlap=beam_overlap(calibration, selection),
        decomposition=decompose(calibration, selection.layers, weighting=settings.weighting),
        gains=marginal_gains(calibration, selection),
        sinks=sink_dominance(calibration, settings),
        sensitivity=sensitivity([calibration, *others], settings),
        cka=cka_floor(calibration, seed=seed),
    )
