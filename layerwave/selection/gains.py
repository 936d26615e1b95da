"""What each layer of a chosen set adds to its score."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from layerwave.calibration import Calibration
from layerwave.selection.methods import settings_of
from layerwave.selection.result import Selection
from layerwave.selection.scores import make_criterion


@dataclass(frozen=True)
class LayerGain:
    """The gain of one layer: a score with it minus a score without it."""

    layer: int
    score: float
    """`without`: the score of the set without this layer; `path`: of the set once the layer has joined."""
    gain: float


@dataclass(frozen=True)
class MarginalGains:
    """Gains of the layers of a set in units of its criterion (entropy: nats). The empty set counts as 0."""

    criterion: str
    layers: tuple[int, ...]
    score: float
    without: tuple[LayerGain, ...]
    """For each layer, the set's score minus the score of the set without it; negative: the set is better without."""
    path: tuple[LayerGain, ...]
    """The layers in the order in which the beam added them, along the parents of greatest score; empty for methods
    that have no beam of every depth (fixed rules, exhaustive)."""

    @property
    def reading(self) -> str:
        """One sentence."""
        least = min(self.without, key=lambda gain: gain.gain)
        change = "rises" if least.gain < 0 else "falls"
        order = f"; the beam added the layers in the order {[step.layer for step in self.path]}" if self.path else ""
        return (
            f"Layer {least.layer} matters least: without it the {self.criterion} of {list(self.layers)} {change} by "
            f"{abs(least.gain):.3f} from {self.score:.3f}{order}."
        )


def marginal_gains(calibration: Calibration, selection: Selection) -> MarginalGains:
    """What each layer of the selection adds to its score, by the criterion that selected it.

    Raises `LayerwaveError` for a layer that the calibration does not have, and for a criterion that has no registered
    name.
    """
    s = settings_of(selection)
    _, criterion = make_criterion(calibration, s.criterion, s.alpha, s.weighting)

    def score(layers: tuple[int, ...]) -> float:
        return float(criterion(np.array([layers]))[0]) if layers else 0.0

    whole, chain = score(selection.layers), _chain(selection)
    others = [(layer, score(tuple(l for l in selection.layers if l != layer))) for layer in selection.layers]
    path = []
    for before, after in pairwise([(), *chain]):
        (layer,) = set(after) - set(before)
        path.append(LayerGain(layer, score(after), score(after) - score(before)))
    return MarginalGains(
        criterion=selection.criterion,
        layers=selection.layers,
        score=whole,
        without=tuple(LayerGain(layer, value, whole - value) for layer, value in others),
        path=tuple(path),
    )


def _chain(selection: Selection) -> list[tuple[int, ...]]:
    """The selection's ancestors from the single layer to the set itself; empty where a depth was not kept."""
    if len(selection.beams) < len(selection.layers):
        return []
    chain, layers = [selection.layers], selection.layers
    for depth in range(len(selection.layers) - 1, 0, -1):
        place = [kept for kept, _ in selection.beams[depth]].index(layers)
        # Beams stand best first, so the first parent is the one of greatest score.
        layers = selection.beams[depth - 1][selection.parents[depth][place][0]][0]
        chain.append(layers)
    return chain[::-1]
