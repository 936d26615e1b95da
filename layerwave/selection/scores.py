"""Scores of layer sets from a calibration: what the beams, the exhaustive search and the baselines ask."""

import numpy as np
from jaxtyping import Float, Integer

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.criteria import Criterion, criterion_factory


def make_criterion(
    calibration: Calibration, criterion: str | Criterion, alpha: float, weighting: str
) -> tuple[str, Criterion]:
    """Name and scoring function of a criterion given by name or as a function.

    The scoring function raises `LayerwaveError` when there is not one score a set, or one is not finite (it names the
    set).
    """
    if callable(criterion):
        name, raw = getattr(criterion, "__name__", type(criterion).__name__), criterion
    else:
        name, raw = criterion, criterion_factory(criterion)(calibration, float(alpha), weighting)

    def score(sets: Integer[np.ndarray, "M m"]) -> Float[np.ndarray, "M"]:
        scores = np.asarray(raw(sets), dtype=np.float64)
        if scores.shape != (len(sets),):
            raise LayerwaveError(
                f"the criterion {name} gives scores of shape {scores.shape} for {len(sets)} sets: return one for each"
            )
        if not np.isfinite(scores).all():
            bad = int(np.argmin(np.isfinite(scores)))
            raise LayerwaveError(
                f"the criterion {name} gives {scores[bad]} for layers {sets[bad].tolist()}: not finite"
            )
        return scores

    return name, score
