"""Times of several ways to do one thing, taken in turns, so that a busy machine slows them all."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax


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


def take_turns(sides: Sequence[Side], repetitions: int) -> list[Timing]:
    """Every side once apart, for compilation; then all of them `repetitions` times, one after the other."""
    first = [_seconds(side.run) for side in sides]
    turns = [[_seconds(side.run) / side.share for side in sides] for _ in range(repetitions)]
    columns = zip(*turns, strict=True)
    return [
        Timing(side.name, apart, seconds, side.share)
        for side, apart, seconds in zip(sides, first, columns, strict=True)
    ]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start
