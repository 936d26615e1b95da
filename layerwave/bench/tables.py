"""Answers as rows of tables, for the terminal and for a page alike."""

from dataclasses import asdict

from layerwave.bench.answer import Answer, Bar
from layerwave.bench.timing import Spread

BARS = ("question", "bar", "asked for", "measured (range)", "holds")
TIMES = ("what", "median", "range", "first call", "part done")
LINES = ("time of what", "sizes", "medians", "exponent", "expected")


def bar_rows(answer: Answer) -> list[tuple[str, ...]]:
    """A row of `BARS` for each bar."""
    return [
        (
            answer.question,
            bar.claim,
            f"{bar.sense} {_in_unit(bar.limit, bar.unit)}",
            _range(bar.measured, bar.unit),
            "yes" if bar.holds else "NO",
        )
        for bar in answer.bars
    ]


def time_rows(answer: Answer) -> list[tuple[str, ...]]:
    """A row of `TIMES` for each side."""
    return [
        (
            timing.name,
            _in_unit(timing.spread.median, "s"),
            f"{_in_unit(timing.spread.low, 's')} to {_in_unit(timing.spread.high, 's')}",
            _in_unit(timing.first, "s"),
            "all" if timing.share == 1 else f"{timing.share:.2%}",
        )
        for timing in answer.timings
    ]


def line_rows(answer: Answer) -> list[tuple[str, ...]]:
    """A row of `LINES` for each line of growth."""
    return [
        (
            line.name,
            ", ".join(map(str, line.sizes)),
            ", ".join(_in_unit(timing.spread.median, "s") for timing in line.timings),
            f"{line.exponent:.2f}",
            line.expected,
        )
        for line in answer.lines
    ]


def record(answer: Answer) -> dict:
    """The answer as JSON takes it, with what follows from the measurements."""
    return asdict(answer) | {
        "timings": [asdict(timing) | asdict(timing.spread) for timing in answer.timings],
        "bars": [asdict(bar) | {"holds": bar.holds} for bar in answer.bars],
        "lines": [asdict(line) | {"exponent": line.exponent} for line in answer.lines],
    }


def unmet(answer: Answer) -> list[Bar]:
    """The bars that do not hold."""
    return [bar for bar in answer.bars if not bar.holds]


def _range(spread: Spread, unit: str) -> str:
    return f"{_in_unit(spread.median, unit)} ({_in_unit(spread.low, unit)} to {_in_unit(spread.high, unit)})"


def _in_unit(value: int | float, unit: str) -> str:
    if unit == "s":
        if value >= 1:
            return f"{value:,.3g} s" if value < 100 else f"{value:,.0f} s"
        return f"{1e3 * value:.3g} ms"
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}"
