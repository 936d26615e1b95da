"""How far the choice of layers depends on the samples: bootstrap frequencies, intervals, and a convergence curve.

The calibration pass kept, beside the sums of all samples, those of R Poisson(1) resamples and of nested subsets of the
samples (`calibration/replicates.py`). All of them, and the whole, go through one batched beam search.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

Layers = tuple[int, ...]

STABLE, FAIR = 0.8, 0.5
"""Shares of the replicates from which on a choice is called stable, or fair (our decision)."""


@dataclass(frozen=True)
class SetStability:
    """One layer set over the bootstrap replicates."""

    layers: Layers
    """The set, sorted; 0-based layer outputs."""
    frequency: float
    """Share of the replicates that chose it, 0 … 1."""
    score: float
    """Its score in the whole calibration, nats."""
    low: float
    """2.5 % quantile of its score over the replicates, nats."""
    high: float
    """97.5 % quantile, nats."""


@dataclass(frozen=True)
class ConvergencePoint:
    """What is chosen from a part of the samples; the parts are nested."""

    share: float
    """Probability with which a sample belongs to the part: 0.125, 0.25, 0.5, or 1 for the whole."""
    samples: int
    """Samples that do."""
    blocks: int
    """Blocks that they gave."""
    layers: Layers
    score: float
    """Score of the set in this part, nats."""


@dataclass(frozen=True, eq=False)
class Stability:
    """How often each layer and each set is chosen when the samples are drawn again, and when there are fewer."""

    method: str
    """`elsi` or `elsi_c`."""
    layers: Layers
    """The choice from all samples, sorted; 0-based layer outputs."""
    score: float
    """Its entropy in the whole calibration, nats."""
    replicates: int
    """Replicates R that were searched."""
    empty: int
    """Replicates that drew no block and were left out of all that is said here."""
    samples: int
    """Samples of the calibration, those without a block included."""
    layer_frequency: Float[np.ndarray, " N"]
    """Share of the replicates whose set holds the layer; sums to the size of the set."""
    sets: tuple[SetStability, ...]
    """The choice first, then every other set that a replicate chose, most frequent first, then those asked for."""
    convergence: tuple[ConvergencePoint, ...]
    """The choice from growing parts of the samples; the last point is the whole. Parts without a block are absent."""
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    """The options of the search, as given."""

    @property
    def num_layers(self) -> int:
        """N."""
        return len(self.layer_frequency)

    @property
    def frequency(self) -> float:
        """Share of the replicates that made the same choice as the whole."""
        return self.sets[0].frequency

    @property
    def settled(self) -> float:
        """Least share of the samples from which on every part makes the choice of the whole; 1: only the whole does."""
        share = 1.0
        for point in reversed(self.convergence):
            if point.layers != self.layers:
                break
            share = point.share
        return share

    @property
    def verdict(self) -> str:
        """`stable` (chosen in at least 80 % of the replicates), `fair` (at least 50 %) or `unstable`; ours."""
        return "stable" if self.frequency >= STABLE else "fair" if self.frequency >= FAIR else "unstable"

    @property
    def reading(self) -> str:
        """One sentence: how often the choice came again, the interval of its score, and from which share on."""
        chosen, rivals = self.sets[0], [row for row in self.sets[1:] if row.frequency > 0]
        rival = f", {_join(rivals[0].layers)} in {rivals[0].frequency:.0%}" if rivals else ""
        since = "only all samples make" if self.settled == 1 else f"{self.settled:.1%} of the samples already make"
        return (
            f"{self.verdict.capitalize()}: layers {_join(self.layers)} come out in {chosen.frequency:.0%} of "
            f"{self.replicates} bootstrap replicates{rival}; entropy {chosen.score:.3f} nats, "
            f"95 % of the replicates between {chosen.low:.3f} and {chosen.high:.3f}; {since} this choice."
        )


def _join(layers: Layers) -> str:
    return ",".join(map(str, layers))
