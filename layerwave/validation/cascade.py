"""The best of very many layer sets without a full training of each: successive halving by measured acceptance.

Every set of the sizes asked for is scored by predicted acceptance; a shortlist is trained together on little data and
halved by the acceptance of its drafts on held-out examples; what is left is trained on twice as much, and so on
(Jamieson and Talwalkar, AISTATS 2016; ours: a set of the lower half stays where it is not told apart from the best).

Each rung is a training of its own from the start, not the last one resumed: a schedule of the learning rate that ends
shows drafts as they would be used, one that is cut in the middle of its cosine does not; and the finalists' drafts are
those that a plain validation would have trained. With half of the sets on twice the steps every rung costs the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from layerwave.errors import LayerwaveError
from layerwave.selection.acceptance import PredictedAcceptance
from layerwave.selection.acceptance_scores import APART
from layerwave.validation.held_out import HeldOut
from layerwave.validation.result import Layers, Stage, Standing

PREDICTED, MEASURED = "predicted acceptance", "held-out acceptance"


@dataclass(frozen=True)
class CascadeSettings:
    """How many sets begin and end. Raises `LayerwaveError` unless 1 <= finalists <= shortlist."""

    shortlist: int = 16
    """Sets of greatest predicted acceptance that are trained at all, shared out among the sizes."""
    finalists: int = 4
    """Sets that are left for a full training and for the questions, at least."""

    def __post_init__(self) -> None:
        if not 1 <= self.finalists <= self.shortlist:
            raise LayerwaveError(
                f"finalists are {self.finalists} of a shortlist of {self.shortlist}: at least 1, at most the shortlist"
            )

    @property
    def rungs(self) -> tuple[float, ...]:
        """Shares of the full training, one for each halving from the shortlist to the finalists: …, 1/4, 1/2."""
        halvings = ceil(log2(self.shortlist / self.finalists))
        return tuple(2.0 ** (rung - halvings) for rung in range(halvings))


def shortlist(found: PredictedAcceptance, count: int, given: Sequence[Layers] = ()) -> Stage:
    """The stage before any training: of each size the sets of greatest predicted acceptance stay.

    The sizes have equal shares of `count`, the larger sizes one more where it does not divide; a size with fewer sets
    keeps all. Given sets stay beside them.
    """
    order = _best_first(found.value, found.sets)
    sizes = sorted({len(layers) for layers in found.sets})
    share = {size: count // len(sizes) + (place >= len(sizes) - count % len(sizes)) for place, size in enumerate(sizes)}
    of_size = {size: [i for i in order if len(found.sets[i]) == size] for size in sizes}
    places = {i: place for members in of_size.values() for place, i in enumerate(members)}
    standings = []
    for i in order:
        layers, place = found.sets[i], places[i]
        stays = place < share[len(layers)]
        why = f"place {place + 1} of {len(of_size[len(layers)])} of its size, {share[len(layers)]} stay"
        if not stays and layers in given:
            stays, why = True, f"{why}; given"
        behind, error = found.difference(i, order[0])
        standings.append(Standing(layers, float(found.value[i]), behind, error, stays, why))
    return Stage(PREDICTED, 0, tuple(standings))


def halve(measured: HeldOut, sets: Sequence[Layers], steps: int, finalists: int) -> Stage:
    """One halving: the upper half stays, of the others those that are not told apart from the best.

    Told apart: behind by more than `APART` standard errors of the paired difference. Without an error, of one row,
    nothing is told apart. At least `finalists` stay.
    """
    order = _best_first(measured.value, sets)
    half = max(ceil(len(sets) / 2), finalists)
    standings = []
    for place, i in enumerate(order):
        behind, error = measured.difference(i, order[0])
        apart = error is not None and -behind > APART * error
        if place < half:
            why = f"place {place + 1} of {len(order)}, {half} stay"
        elif apart:
            why = f"place {place + 1} of {len(order)}, told apart from the best"
        else:
            why = f"place {place + 1} of {len(order)}, not told apart from the best"
        stays = place < half or not apart
        standings.append(Standing(sets[i], float(measured.value[i]), behind, error, stays, why))
    return Stage(MEASURED, steps, tuple(standings))


def staying(stage: Stage) -> list[Layers]:
    """The sets that go on, in the order of sizes and layers."""
    return sorted((found.layers for found in stage.standings if found.stays), key=lambda layers: (len(layers), layers))


def cost(stages: Sequence[Stage], finalists: int, steps: int, seeds: int) -> dict[str, int]:
    """Draft-steps (training steps times drafts) of the cascade, and what full trainings would have taken."""
    trained = sum(stage.steps * len(stage.standings) for stage in stages)
    return {
        "draft-steps of the cascade": trained + finalists * steps * seeds,
        "draft-steps of full runs of the shortlist": len(staying(stages[0])) * steps * seeds,
        "draft-steps of full runs of all sets": len(stages[0].standings) * steps * seeds,
    }


def _best_first(values: np.ndarray, sets: Sequence[Layers]) -> list[int]:
    """Greater value, then fewer layers, then lower ones."""
    return sorted(range(len(sets)), key=lambda i: (-values[i], len(sets[i]), sets[i]))
