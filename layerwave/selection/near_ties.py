"""Choices that rounding may turn around: sets that score alike, at the end of a search and at the cuts within it.

At the end the scores tell. Within a beam, what was cut off by as little might have led elsewhere: the search is made
once more with every near tie at its cuts turned around, for which only sets that it had not met are scored.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from layerwave.selection.criteria import Criterion
from layerwave.selection.result import Layers
from layerwave.selection.sets import join
from layerwave.warned import warn

NEAR = {"acceptance": 1e-4}
NEAR_ELSEWHERE = 1e-5
"""Numbers nearer than this may change order with the batches or devices of the pass, which agree to 1e-5."""

Beam = Sequence[tuple[Layers, float]]


def nearness(criterion: str) -> float:
    """Scores of this criterion are nearly tied when they differ by no more."""
    return NEAR.get(criterion, NEAR_ELSEWHERE)


class Remembered:
    """A criterion that is asked for every set once."""

    def __init__(self, criterion: Criterion):
        self.criterion = criterion
        self.known: dict[Layers, float] = {}

    def __call__(self, sets: Integer[np.ndarray, "M m"]) -> Float[np.ndarray, "M"]:
        asked = [tuple(row) for row in sets.tolist()]
        if new := [layers for layers in dict.fromkeys(asked) if layers not in self.known]:
            self.known |= zip(new, self.criterion(np.array(new)).tolist(), strict=True)
        return np.array([self.known[layers] for layers in asked])


def warn_of_near_ties(
    layers: Layers, beams: Sequence[Beam], criterion: str, turned: tuple[Layers, Sequence[Beam]] | None = None
) -> None:
    """Says in one line which other sets rounding might choose.

    Args:
        layers: the choice. beams: of every depth of its search; the last is what it was chosen from.
        turned: choice and beams of the same search when near ties at the cuts within it go the other way.
    """
    near, last = nearness(criterion), dict(beams[-1])
    tied = [other for other in last if layers in last and other != layers and abs(last[other] - last[layers]) <= near]
    said = []
    if tied:
        named = " and ".join(join(other) for other in tied[:3])
        said.append(f"{join(layers)} and {named} differ by less than {near:g} in {criterion}")
    if turned and turned[0] not in (layers, *tied):
        apart = next(filter(None, (_apart(*pair) for pair in zip(beams, turned[1], strict=True))))
        said.append(
            f"less than {near:g} decides whether the beam keeps {' or '.join(map(join, apart[:4]))}, and so between "
            f"{join(layers)} and {join(turned[0])}"
        )
    if said:
        warn(f"near tie: {'; '.join(said)}, which other batches, devices or machines may turn around")


def _apart(beam: Beam, other: Beam) -> list[Layers]:
    """Sets of one of two beams."""
    return sorted(dict(beam).keys() ^ dict(other).keys())
