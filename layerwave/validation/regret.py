"""What choosing by a criterion costs against the best set found, without the winner's curse.

The set of greatest measured τ is partly the luckiest one, so that its τ, and with it every regret, is too great. Here
the best set is looked for with one half of the measurements (half of the seeds, where there are two, and half of every
column's questions) and compared with the criterion's choice on the other half, over many splits. That is what choosing
by such a half would have gained on average: free of the curse, a little short of the gain of the truly best set, and
negative where the choice is better. Of one seed, the luck of its training is in both halves and is not removed.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from layerwave.validation.accepted import Accepted, Draws, average
from layerwave.validation.ranks import Strata, order

SPLITS = 100


@dataclass(frozen=True, eq=False)
class Halves:
    """The AVG of M sets in one half of the measurements and in the other; every split stands twice, once each way."""

    here: Float[np.ndarray, "H M"]
    there: Float[np.ndarray, "H M"]


def halves(accepted: Accepted, seed: int = 0, splits: int = SPLITS) -> Halves | None:
    """Splits of seeds and of questions; None of a single question."""
    if accepted.questions < 2:
        return None
    rng = np.random.default_rng(seed)
    questions = np.zeros((splits, accepted.questions), bool)
    for stratum in accepted.strata:
        questions[:, stratum] = _half(len(stratum), splits, rng)
    seeds = _half(accepted.seeds, splits, rng) if accepted.seeds > 1 else None
    sides = []
    for side in (True, False):
        chosen = np.ones((splits, 1)) if seeds is None else (seeds == side).astype(np.float64)
        draws = Draws(chosen / chosen.sum(axis=1, keepdims=True), (questions == side).astype(np.float64))
        sides.append(average(accepted, draws))
    here, there = sides
    return Halves(np.concatenate([here, there]), np.concatenate([there, here]))


def _half(count: int, splits: int, rng: np.random.Generator) -> np.ndarray:
    """Half of `count` things in each split (splits, count), the odd one on either side."""
    places = rng.permuted(np.tile(np.arange(count), (splits, 1)), axis=1)
    return places < count // 2 + rng.integers(0, 1 + count % 2, size=(splits, 1))


@dataclass(frozen=True)
class Regret:
    """τ (AVG) of the best set minus τ of the choice, in tokens a round."""

    value: float | None
    """On halves that did not choose the best set; None of a single question."""
    interval: tuple[float, float] | None
    """95 %, over seeds and questions, for the sets that the halves found best."""
    measured: float
    """To the best set on the same measurements: too great, by the winner's curse."""


def regret(
    choice: Float[np.ndarray, " M"],
    members: Int[np.ndarray, " n"],
    measured: Float[np.ndarray, " M"],
    draws: Float[np.ndarray, "R M"] | None,
    split: Halves | None,
) -> Regret:
    """Regret of a choice against the best of a group of sets.

    Args:
        choice: weights of the sets, of sum 1: sets that a criterion scores alike share its choice.
        members: the group.
        measured: AVG of every set.
        draws: the same in resamples of seeds and questions; None where nothing can be resampled.
    """
    behind = float(measured[members].max() - measured @ choice)
    if split is None:
        return Regret(None, None, behind)
    picked = members[np.argmax(split.here[:, members], axis=1)]
    value = float((split.there[np.arange(len(picked)), picked] - split.there @ choice).mean())
    if draws is None:
        return Regret(value, None, behind)
    share = np.bincount(picked, minlength=len(choice)) / len(picked)
    apart = draws @ (share - choice)
    low, high = (value + np.quantile(apart, (0.025, 0.975)) - apart.mean()).tolist()
    return Regret(value, (low, high), behind)


def ceiling(strata: Strata, split: Halves) -> float:
    """About what the true τ would correlate with the measured one: the root of its reliability.

    The reliability is the correlation between halves, stepped up to the whole (Spearman 1910, Brown 1910); 0 where
    halves do not agree at all.
    """
    here, there = (order("spearman", half, strata) for half in (split.here, split.there))
    agreement = max(0.0, float((here * there).sum(axis=1).mean()))
    return float(np.sqrt(2 * agreement / (1 + agreement)))
