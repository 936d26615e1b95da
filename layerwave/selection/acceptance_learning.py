"""Predicted acceptance when the drafts are fitted on fewer positions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwave.calibration.token_sample import TokenSample
from layerwave.errors import LayerwaveError
from layerwave.selection.acceptance_scores import AcceptanceScores, Difference, ScoredSet, named

PARTS = (1 / 8, 1 / 4, 1 / 2)
"""Parts of the fitting positions, beside all of them."""

PER_POSITION = ("embeddings", "normed", "samples", "positions", "priorities", "sinks")
"""Arrays of a token sample whose first axis is that of the positions."""


@dataclass(frozen=True)
class LearningPoint:
    """α̂ of the followed sets when the drafts are fitted on so many positions."""

    positions: int
    sets: tuple[ScoredSet, ...]
    behind: tuple[Difference, ...]
    """α̂ of each set minus that of the first."""


@dataclass(frozen=True)
class LearningCurve:
    """α̂ of some sets, fitted on nested parts of the positions; all of them come last."""

    points: tuple[LearningPoint, ...]
    missing: tuple[str, ...]
    """Why points are missing."""

    @property
    def reading(self) -> str:
        """One sentence."""
        if len(self.points) < 2:
            return f"There is none: {'; '.join(self.missing)}."
        before, last = self.points[-2:]
        orders = {tuple(np.argsort([-scored.value for scored in point.sets])) for point in self.points}
        order = "the same" if len(orders) == 1 else "not the same"
        return (
            f"Fitted on {last.positions:,} positions instead of {before.positions:,}, α̂ of {named(last.sets[0])} "
            f"changes by {last.sets[0].value - before.sets[0].value:+.4f}; the order of the {len(last.sets)} sets "
            f"followed is {order} at every number of positions from {self.points[0].positions:,} on."
        )


def learning_curve(scores: AcceptanceScores, followed: Sequence[ScoredSet]) -> LearningCurve:
    """α̂ of sets, the first of which the others are compared with, fitted on ⅛, ¼, ½ and all of the positions."""
    fitting, points, missing = int(scores.fitting.sum()), [], []
    for positions in (round(part * fitting) for part in PARTS):
        tokens = first_positions(scores, positions)
        fewer = AcceptanceScores(replace(scores.calibration, tokens=tokens), scores.weighting)
        try:
            points.append(_point(fewer, positions, [fewer[whole.layers] for whole in followed]))
        except LayerwaveError as error:  # too few to fit on: said in the result
            missing.append(f"{positions} positions: {error}")
    return LearningCurve((*points, _point(scores, fitting, followed)), tuple(missing))


def _point(scores: AcceptanceScores, positions: int, sets: Sequence[ScoredSet]) -> LearningPoint:
    return LearningPoint(positions, tuple(sets), tuple(scores.difference(scored, sets[0]) for scored in sets))


def first_positions(scores: AcceptanceScores, number: int) -> TokenSample:
    """The token sample with the first of its fitting positions alone, in order of priority, and all that score."""
    tokens = scores.calibration.tokens
    kept = np.flatnonzero(tokens.scoring | (scores.fitting & (np.cumsum(scores.fitting) <= number)))
    parts = {name: getattr(tokens, name)[kept] for name in PER_POSITION}
    return replace(tokens, states=tokens.states[:, kept], **parts)
