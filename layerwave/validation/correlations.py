"""Rank correlations of criteria with τ, and how much of each is chance.

Two things could have come out otherwise, and each has an interval (95 %) of its own. *Other measurements*: seeds and
questions are resampled, with these sets. *Other sets*: sets are resampled within their sizes, with the measured τ.

Noise in τ lowers every correlation, and resampling adds the same noise once more. So the resamples of the measurements
are moved to have their mean at the estimate: the interval is for the correlation that a measurement of this size finds
on average.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from layerwave.validation.ranks import Strata, order

LEAST, LEAST_OF_OTHERS = 3, 5
"""Sets that a rank correlation needs, and those from which one may conclude on others."""

EQUAL = 1e-9
"""Correlations that differ by no more are equal, and so are scores that differ by no more of the greatest."""

DIGITS = 12
"""Beyond these a correlation is rounding."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Correlation:
    """A rank correlation, or the difference of two, and its 95 % intervals."""

    value: float | None
    over_measurements: Interval | None = None
    """Other seeds and questions, these sets."""
    over_sets: Interval | None = None
    """Other sets, these measurements."""
    missing: str = ""
    """Why the value, or an interval, is None."""

    @property
    def side(self) -> tuple[int, int]:
        """On which side of 0 each of the two intervals lies; 0 where it holds 0 or is missing."""
        return _side(self.over_measurements), _side(self.over_sets)


@dataclass(frozen=True, eq=False)
class Correlations:
    """Of K criteria with τ, as measured and in R resamples."""

    values: Float[np.ndarray, " K"]
    missing: tuple[str, ...]
    """Why each is undefined, or nothing."""
    compared: int
    """Sets that can be compared with one of them, and this one."""
    over_measurements: Float[np.ndarray, "R K"] | None
    over_sets: Float[np.ndarray, "R K"]

    def __getitem__(self, k: int) -> Correlation:
        if self.missing[k]:
            return Correlation(None, missing=self.missing[k])
        drawn = self.over_measurements
        here = None if drawn is None else drawn[:, k]
        return self._with_intervals(float(self.values[k]), here, self.over_sets[:, k], most=1.0)

    def difference(self, k: int, reference: int) -> Correlation:
        """Correlation of one criterion minus that of another, paired over the resamples."""
        if missing := self.missing[k] or self.missing[reference]:
            return Correlation(None, missing=missing)
        elsewhere = self.over_sets[:, k] - self.over_sets[:, reference]
        if np.abs(elsewhere).max() < EQUAL:
            return Correlation(None, missing="both order the sets alike")
        drawn = self.over_measurements
        here = None if drawn is None else drawn[:, k] - drawn[:, reference]
        return self._with_intervals(float(self.values[k] - self.values[reference]), here, elsewhere, most=2.0)

    def _with_intervals(
        self, value: float, here: Float[np.ndarray, " R"] | None, elsewhere: Float[np.ndarray, " R"], *, most: float
    ) -> Correlation:
        over_measurements = over_sets = None
        missing = []
        if here is None:
            missing.append("one seed and one question: no other measurements can be drawn")
        else:
            over_measurements = _interval(here + (value - here.mean()), most)
        low, high = _interval(elsewhere, most)
        if self.compared < LEAST_OF_OTHERS:
            missing.append(f"{self.compared} sets say too little of other sets")
        elif high - low < EQUAL:
            missing.append("all resamples of the sets agree, as of perfect orders, and say nothing of other sets")
        else:
            over_sets = low, high
        return Correlation(round(value, DIGITS), over_measurements, over_sets, "; ".join(missing))


def correlate(
    coefficient: str,
    strata: Strata,
    scores: Float[np.ndarray, "K M"],
    measured: Float[np.ndarray, " M"],
    drawn: Float[np.ndarray, "R M"] | None,
    others: Int[np.ndarray, "R M"],
) -> Correlations:
    """Correlates the scores of K criteria with τ within strata.

    A resample in which all scores or all τ are equal ranks nothing and counts as 0.

    Args:
        coefficient: `spearman` or `kendall` (τ-b).
        strata: places of the sets that are compared with each other.
        scores: finite.
        measured: τ.
        drawn: τ in resamples of the measurements; None where nothing can be resampled.
        others: resamples of the sets, see `resampled_sets`.
    """
    scored, found = (order(coefficient, values, strata) for values in (scores, measured))
    elsewhere = order(coefficient, measured[others], strata)
    return Correlations(
        scored @ found,
        tuple(_undefined(strata, own, found) for own in scored),
        compared_sets(strata),
        None if drawn is None else order(coefficient, drawn, strata) @ scored.T,
        np.stack([(order(coefficient, own[others], strata) * elsewhere).sum(axis=1) for own in scores], axis=1),
    )


def resampled_sets(sizes: Int[np.ndarray, " M"], resamples: int, seed: int) -> Int[np.ndarray, "R M"]:
    """In place of every set one of its size, with replacement."""
    rng = np.random.default_rng(seed)
    others = np.empty((resamples, len(sizes)), np.int64)
    for size in np.unique(sizes):
        members = np.flatnonzero(sizes == size)
        others[:, members] = rng.choice(members, size=(resamples, len(members)))
    return others


def compared_sets(strata: Strata) -> int:
    """Sets that can be compared with one of them, and this one: in one stratum its sets."""
    return 1 + sum(len(stratum) - 1 for stratum in strata)


def _undefined(strata: Strata, scored: Float[np.ndarray, " f"], found: Float[np.ndarray, " f"]) -> str:
    if compared_sets(strata) < LEAST:
        return f"fewer than {LEAST} sets"
    if not found.any():
        return "all sets have the same τ"
    return "" if scored.any() else "all sets score alike"


def _interval(draws: Float[np.ndarray, " R"], most: float) -> Interval:
    """95 % percentile interval, within the range of the statistic."""
    low, high = np.clip(np.quantile(draws, (0.025, 0.975)), -most, most).round(DIGITS).tolist()
    return low, high


def _side(interval: Interval | None) -> int:
    return 0 if interval is None else int(interval[0] > 0) - int(interval[1] < 0)
