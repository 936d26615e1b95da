"""Times of several ways to do one thing, taken in turns, so that a busy machine slows them all."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from layerwave.errors import LayerwaveError


@dataclass(frozen=True)
class Side:
    """One way to do it."""

    name: str
    run: Callable[[], object]
    share: float = 1.0
    """Part of the work that `run` does; its seconds are divided by it: extrapolated."""


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Timing:
    """Seconds of one side, for the whole work."""

    name: str
    first: float
    """The first call, compilation included; not extrapolated."""
    seconds: tuple[float, ...]
    """One a repetition, compiled."""
    share: float = 1.0
    """Part of the work that was done; the rest is extrapolated."""

    @property
    def spread(self) -> Spread:
        return Spread.of(self.seconds)

    def times(self, other: "Timing") -> Spread:
        """How many times the other's seconds this one takes, repetition by repetition."""
        return Spread.of([ours / theirs for ours, theirs in zip(self.seconds, other.seconds, strict=True)])


def take_turns(
    sides: Sequence[Side], repetitions: int, check: Callable[[list], None] = lambda results: None
) -> list[Timing]:
    """Every side once apart, for compilation; then all of them `repetitions` times, one after the other.

    `check` gets what the first calls returned, and raises when they disagree.
    """
    results, first = zip(*(_timed(side.run) for side in sides), strict=True)
    check(list(results))
    turns = [[_timed(side.run)[1] / side.share for side in sides] for _ in range(repetitions)]
    columns = zip(*turns, strict=True)
    return [
        Timing(side.name, apart, seconds, side.share)
        for side, apart, seconds in zip(sides, first, columns, strict=True)
    ]


def _timed(run: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return result, time.perf_counter() - start


def require_equal(what: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Raises `LayerwaveError` when values lie `tolerance` or more apart, or are not finite."""
    apart = float(np.max(np.abs(np.asarray(found) - expected)))
    if not apart < tolerance:
        raise LayerwaveError(
            f"{what} differs by {apart:.1e} from layerwave's values: expected less than {tolerance:.0e}"
        )
