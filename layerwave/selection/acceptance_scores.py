"""Predicted acceptance of sets of any size, and what may be said of their differences."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Integer

from layerwave.calibration import Calibration
from layerwave.selection.acceptance import CALL, PredictedAcceptance, predicted_acceptance

Layers: TypeAlias = tuple[int, ...]

APART = 2.0
"""Two sets are told apart when they differ by more than this many standard errors of their paired difference."""

RESAMPLES = 1000
"""Bootstrap resamples of the scoring conversations: a share is then right to 3 % (two standard errors)."""


@dataclass(frozen=True)
class ScoredSet:
    """A layer set with its predicted acceptance α̂."""

    layers: Layers
    value: float
    """α̂: the expected probability that the target accepts a token of the best linear draft, 0 … 1."""
    standard_error: float
    """Of α̂, over the scoring conversations."""
    agreement: float
    """Share of the scoring positions at which the draft's most probable token is the target's."""
    ridge: float
    """λ of the fit."""

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.4f}"


@dataclass(frozen=True)
class Difference:
    """α̂ of one set minus α̂ of another, at the same scoring positions."""

    value: float
    standard_error: float
    """Paired over the scoring conversations: what makes a conversation easy for both sets cancels."""

    @property
    def told_apart(self) -> bool:
        """Whether the two sets may be called different."""
        return abs(self.value) > APART * self.standard_error

    def __str__(self) -> str:
        return f"{self.value:+.4f} ± {self.standard_error:.4f}"


@dataclass(frozen=True)
class Resampled:
    """The scored sets of one size over resamples of the scoring conversations.

    The drafts are not fitted again, so what other fitting conversations would change is not in it.
    """

    frequency: dict[Layers, float]
    """Share of the resamples in which each set is the best."""
    held_out: float
    """Mean α̂ of the set that a resample chose, on the conversations that it left out: the best of many sets is a
    little too good where it was chosen, and this is not."""


class AcceptanceScores:
    """The criterion `acceptance`, which keeps the list of what it scored and compares sets of different sizes.

    Called with sorted sets of one size it scores them, for `elsi` and the others; `scores[layers]` is one set.

    Args:
        calibration: with a token sample. It remembers every score, so that asking again costs nothing.
        weighting: `raw`, or `trace`: every layer weighs the same.
        progress: called with the number of sets scored so far.
    """

    __name__ = "acceptance"

    def __init__(self, calibration: Calibration, weighting: str = "raw", progress: Callable[[int], None] | None = None):
        self.calibration, self.weighting, self.progress = calibration, weighting, progress
        self.sets: dict[Layers, None] = {}
        """Every set scored so far, in this order."""

    def __call__(self, sets: Integer[np.ndarray, "M m"]) -> Float[np.ndarray, "M"]:
        return self._predicted([tuple(row) for row in sets.tolist()]).value

    def __getitem__(self, layers: Iterable[SupportsIndex]) -> ScoredSet:
        return _rows(self._predicted([tuple(layers)]))[0]

    def _predicted(self, sets: Sequence[Layers]) -> PredictedAcceptance:
        for start in range(0, len(sets), CALL):
            part = predicted_acceptance(self.calibration, sets[start : start + CALL], weighting=self.weighting)
            known = len(self.sets)
            self.sets |= dict.fromkeys(part.sets)
            if self.progress is not None and len(self.sets) > known:
                self.progress(len(self.sets))
        return predicted_acceptance(self.calibration, sets, weighting=self.weighting)

    def _of_size(self, size: int) -> PredictedAcceptance:
        return self._predicted([layers for layers in self.sets if len(layers) == size])

    @property
    def fitting(self) -> Bool[np.ndarray, " Q"]:
        """Which positions of the token sample the drafts are fitted on."""
        tokens = self.calibration.tokens
        return tokens.fitting & tokens.used(self.calibration.settings.sinks)

    @property
    def counts(self) -> Integer[np.ndarray, " S"]:
        """Positions of each scoring conversation."""
        return self._predicted([(0,)]).counts

    @property
    def covered(self) -> float:
        """Mean mass of the target's distribution on the tokens that are scored."""
        return self._predicted([(0,)]).covered

    def of_size(self, size: int) -> tuple[ScoredSet, ...]:
        """Every set of this size that was scored so far."""
        known = any(len(layers) == size for layers in self.sets)
        return _rows(self._of_size(size)) if known else ()

    def difference(self, one: ScoredSet, other: ScoredSet) -> Difference:
        """α̂ of `one` minus α̂ of `other`, sets of any size, with its paired standard error."""
        return Difference(*self._predicted([one.layers, other.layers]).difference(0, 1))

    def resampled(self, size: int) -> Resampled:
        """How the scored sets of one size fare when the scoring conversations are drawn again, with replacement."""
        rivals = self._of_size(size)
        samples = len(rivals.counts)
        draws = np.random.default_rng(0).multinomial(samples, np.full(samples, 1 / samples), size=RESAMPLES)
        # α̂ of a resample is this over its number of positions, which is the same for all sets.
        winners = np.argmax(draws @ rivals.by_sample.T, axis=1)
        left_out = draws == 0
        told = left_out.any(axis=1)
        held_out = (left_out * rivals.by_sample[winners]).sum(axis=1)[told] / (left_out @ rivals.counts)[told]
        shares = np.bincount(winners, minlength=len(rivals.sets)) / RESAMPLES
        return Resampled(dict(zip(rivals.sets, shares.tolist(), strict=True)), float(held_out.mean()))


def _rows(found: PredictedAcceptance) -> tuple[ScoredSet, ...]:
    columns = (found.value, found.standard_error, found.agreement, found.ridge)
    return tuple(map(ScoredSet, found.sets, *(column.tolist() for column in columns)))


def named(scored: ScoredSet) -> str:
    """A set in a sentence."""
    return f"layer{'s' * (len(scored.layers) > 1)} {','.join(map(str, scored.layers))}"
