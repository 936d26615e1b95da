"""The score of a set, split into informativeness and diversity."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np

from layerwave.calibration import Calibration
from layerwave.kernels import gram, matrix_entropy
from layerwave.selection.criteria import layer_states
from layerwave.selection.sets import check_layers


@dataclass(frozen=True)
class LayerPart:
    """What one layer brings into the concatenation."""

    layer: int
    weight: float
    """`w_l = tr K_l / Σ_{j∈L} tr K_j`, its share of the set's trace."""
    entropy: float
    """`S_1(ρ_l)` of the layer alone, nats."""


@dataclass(frozen=True)
class Decomposition:
    """`S_1(L) = Σ w_l S_1(ρ_l) + χ(L)`: informativeness and diversity of a set, all in nats.

    `χ` is the Holevo information of the ensemble `{w_l, ρ_l}` (Holevo 1973): `0 <= χ <= H(w)`.
    """

    parts: tuple[LayerPart, ...]
    """One a layer of the set, in order of the layers."""
    score: float
    """`S_1(L)` of the concatenation."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The set."""
        return tuple(part.layer for part in self.parts)

    @property
    def informativeness(self) -> float:
        """`Σ w_l S_1(ρ_l)`: the mean entropy of the layers, each weighed by its trace."""
        return sum(part.weight * part.entropy for part in self.parts)

    @property
    def diversity(self) -> float:
        """`χ = S_1(L) - Σ w_l S_1(ρ_l)`: what the layers add by being different; 0 for copies."""
        return self.score - self.informativeness

    @property
    def max_diversity(self) -> float:
        """`H(w)`, the entropy of the weights: χ reaches it when no two layers share a direction of token space."""
        weights = np.array([part.weight for part in self.parts])
        return float(-np.sum(weights * np.log(weights)))

    @property
    def bound(self) -> float:
        """`Σ w_l S_1(ρ_l) + H(w)`, an upper bound of the score that needs no eigenvalues of the set."""
        return self.informativeness + self.max_diversity

    @property
    def reading(self) -> str:
        """One sentence."""
        heaviest = max(self.parts, key=lambda part: part.weight)
        return (
            f"Of the {self.score:.3f} nats of {list(self.layers)}, {self.informativeness:.3f} are the layers' own and "
            f"{self.diversity:.3f} (of {self.max_diversity:.3f} possible) their difference; layer {heaviest.layer} "
            f"carries {heaviest.weight:.0%} of the weight."
        )


def decompose(calibration: Calibration, layers: Iterable[SupportsIndex], *, weighting: str = "raw") -> Decomposition:
    """Splits `S_1` of a layer set into informativeness and diversity.

    Args:
        calibration: block-averaged states of the N layers.
        layers: the set, in any order.
        weighting: `raw` (the paper), or `trace`: all weights are then `1 / m`.

    Raises:
        LayerwaveError: for an unknown weighting, and layers out of range or repeated.
    """
    layers = check_layers(layers, calibration.num_layers)
    grams = gram(layer_states(calibration, weighting)[list(layers)])
    traces = np.trace(grams, axis1=1, axis2=2)
    parts = zip(layers, traces / traces.sum(), matrix_entropy(grams), strict=True)
    return Decomposition(
        parts=tuple(LayerPart(layer, float(weight), float(entropy)) for layer, weight, entropy in parts),
        score=float(matrix_entropy(grams.sum(axis=0))),
    )
