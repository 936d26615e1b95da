"""What a question of the benchmark is answered with: times, bars and lines of growth."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from layerwave.bench.timing import Spread, Timing


@dataclass(frozen=True)
class Bar:
    """A claim about speed or memory beside what was measured."""

    claim: str
    measured: Spread
    sense: Literal["at least", "at most"]
    limit: int | float
    unit: str
    """x (a ratio), s or MB."""
    why: str = ""
    """What limits it, with figures of the same run."""

    @property
    def holds(self) -> bool:
        """Whether the median keeps to the limit."""
        within = self.measured.median >= self.limit if self.sense == "at least" else self.measured.median <= self.limit
        return bool(within)


@dataclass(frozen=True)
class Line:
    """Time against one size, all else fixed."""

    name: str
    expected: str
    """What the method's operation counts say of the exponent, and why."""
    sizes: tuple[int, ...]
    timings: tuple[Timing, ...]

    @property
    def exponent(self) -> float:
        """Slope of log time in log size, by least squares."""
        medians = [timing.spread.median for timing in self.timings]
        return float(np.polyfit(np.log(self.sizes), np.log(medians), 1)[0])


@dataclass(frozen=True)
class Answer:
    """One question with everything that was measured for it."""

    question: str
    size: str
    timings: tuple[Timing, ...] = ()
    bars: tuple[Bar, ...] = ()
    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
