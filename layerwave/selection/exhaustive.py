"""Every set of a size: the optimum, and where given sets rank among all of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import comb
from typing import SupportsIndex

import numpy as np

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.criteria import Criterion
from layerwave.selection.near_ties import warn_of_near_ties
from layerwave.selection.result import Selection, as_beam
from layerwave.selection.scores import make_criterion
from layerwave.selection.sets import TIE, all_sets, check_count, check_layers, check_size, eligible, ranking
from layerwave.warned import warnings_kept


def exhaustive(
    calibration: Calibration,
    size: int = 3,
    alpha: float = 1.0,
    *,
    beam: int = 10,
    weighting: str = "raw",
    criterion: str | Criterion = "entropy",
) -> Selection:
    """The best of all `C(N, size)` layer sets: the optimum that a beam may miss, for its score is not submodular.

    All sets stream in blocks, so that memory does not grow with their number; time does (about 0.1 ms a set on a CPU).

    Args:
        calibration, size, alpha, weighting, criterion: as in `elsi`, with the same rule for a single layer: the
            choice lies after the middle, while the kept sets are the best of all layers.
        beam: how many of the best sets to keep in the result.

    Raises:
        LayerwaveError: as `elsi`.
    """
    num_layers = calibration.num_layers
    size, beam = check_size(size, num_layers), check_count("beam", beam)
    with warnings_kept() as warnings:
        name, score = make_criterion(calibration, criterion, alpha, weighting)
        best, kept_sets, kept_scores = None, np.empty((0, size), dtype=np.int64), np.empty(0)
        for sets in all_sets(num_layers, size):
            scores = score(sets)
            sets, scores = np.concatenate([kept_sets, sets]), np.concatenate([kept_scores, scores])
            order = ranking(scores, sets)
            sets, scores = sets[order], scores[order]
            # A single layer's choice may lie below the cut; all single layers come in one block.
            choice = int(np.argmax(eligible(sets, num_layers)))
            best = sets[choice], scores[choice]
            kept_sets, kept_scores = sets[:beam], scores[:beam]
        layers, value = tuple(best[0].tolist()), best[1]
        kept = as_beam(kept_sets, kept_scores)
        warn_of_near_ties(layers, (kept,), name)
    return Selection(
        method="exhaustive",
        layers=layers,
        score=float(value),
        num_layers=num_layers,
        calibration=calibration.fingerprint,
        criterion=name,
        settings={"size": size, "beam": beam, "alpha": alpha, "weighting": weighting},
        beams=(kept,),
        parents=(((),) * len(kept_sets),),
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class SetRank:
    """Where a set stands among all sets of its size."""

    layers: tuple[int, ...]
    score: float
    rank: int
    """1 is the best; tied sets share the better rank."""
    total: int
    """Number of sets of this size."""
    gap: float
    """Score of the best of all sets of this size, without the rule for single layers, minus this score."""

    @property
    def percentile(self) -> float:
        """Share of the other sets that do not score higher, in percent: 100 for the best."""
        return 100.0 * (self.total - self.rank) / (self.total - 1) if self.total > 1 else 100.0


def rank_among_all(
    calibration: Calibration,
    sets: Iterable[Iterable[SupportsIndex]],
    alpha: float = 1.0,
    *,
    weighting: str = "raw",
    criterion: str | Criterion = "entropy",
) -> tuple[SetRank, ...]:
    """Rank of each given set among all sets of the same size; all sets are scored once, in blocks.

    Raises `LayerwaveError` for no set, sets of different sizes, and layers out of range or repeated.
    """
    num_layers = calibration.num_layers
    given = [check_layers(layers, num_layers) for layers in sets]
    if len({len(layers) for layers in given}) != 1:
        raise LayerwaveError(
            f"{len(given)} sets of sizes {[len(s) for s in given]}: give sets of one size, at least one"
        )
    _, score = make_criterion(calibration, criterion, alpha, weighting)
    scores = score(np.array(given))
    higher, best = np.zeros(len(given), dtype=np.int64), -np.inf
    for block in all_sets(num_layers, len(given[0])):
        every = np.sort(score(block))
        higher += len(every) - np.searchsorted(every, scores + TIE, side="right")
        best = max(best, every[-1])
    total = comb(num_layers, len(given[0]))
    return tuple(
        SetRank(layers, float(value), int(above) + 1, total, float(best - value) if above else 0.0)
        for layers, value, above in zip(given, scores, higher, strict=True)
    )
