"""How much of a CKA is similarity, and how much too few tokens: debiased values and a permutation floor."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import centred_gram, cka, shuffled_cka
from layerwave.selection.criteria import layer_states

SATURATED = 1e-6
"""When no two layers differ by more than this, `max(1 - M)`, transitions live in digits that carry no meaning."""


@dataclass(frozen=True, eq=False)
class CkaFloor:
    """CKA between all layers by both estimators, beside what layers without any relation would show.

    The floors are quantiles of the same estimator after the rows (tokens) of every layer were shuffled
    independently; NaN on the diagonal, where there is nothing to compare.
    """

    biased: Float[np.ndarray, "N N"]
    debiased: Float[np.ndarray, "N N"]
    biased_floor: Float[np.ndarray, "N N"]
    debiased_floor: Float[np.ndarray, "N N"]
    quantile: float
    permutations: int
    seed: int

    @property
    def spread(self) -> float:
        """`max(1 - M)` of the biased matrix."""
        return float(np.max(1 - self.biased))

    @property
    def saturated(self) -> bool:
        """True when the biased matrix is 1 everywhere to within `SATURATED`."""
        return self.spread < SATURATED

    @property
    def related(self) -> float:
        """Share of the pairs of layers whose debiased CKA lies above its floor; by chance `1 - quantile`."""
        pairs = np.triu_indices(len(self.debiased), 1)
        return float(np.mean(self.debiased[pairs] > self.debiased_floor[pairs]))

    @property
    def reading(self) -> str:
        """One sentence."""
        pairs = np.triu_indices(len(self.biased), 1)
        warning = "WARNING: the matrix is saturated, its transitions mean nothing: " if self.saturated else ""
        return (
            f"{warning}Pairs of layers have a median CKA of {np.median(self.biased[pairs]):.2f} where unrelated ones "
            f"would reach {np.median(self.biased_floor[pairs]):.2f}; debiased it is "
            f"{np.median(self.debiased[pairs]):.2f}, and {self.related:.0%} of the pairs lie above their floor."
        )


def cka_floor(calibration: Calibration, *, permutations: int = 200, quantile: float = 0.95, seed: int = 0) -> CkaFloor:
    """CKA by both estimators, and the quantile of each after shuffling the tokens of every layer independently.

    Args:
        calibration: block-averaged states of the N layers, of at least 4 tokens.
        permutations: shuffles that the quantile is taken over, at least 20.
        quantile: of the null distribution, between 0 and 1.
        seed: of the shuffles.

    Raises:
        LayerwaveError: for options out of range, fewer than two layers or four tokens, and a layer that is constant.

    Source: permutation test of independence, Gretton et al., "A kernel statistical test of independence", NeurIPS
    2007; that biased CKA is high without any relation when tokens are few: Murphy, Zylberberg and Fyshe, arXiv
    2405.01012.
    """
    if permutations < 20:
        raise LayerwaveError(f"permutations is {permutations}: give at least 20, or the quantile means nothing")
    if not 0 < quantile < 1:
        raise LayerwaveError(f"quantile is {quantile}: it must lie between 0 and 1")
    if calibration.num_layers < 2:
        raise LayerwaveError("one layer has no pairs: at least 2 layers are needed")
    states = layer_states(calibration)
    grams = centred_gram(states)
    tokens = np.broadcast_to(np.arange(states.shape[1]), (permutations, *states.shape[:2]))
    orders = np.random.default_rng(seed).permuted(tokens, axis=2)

    def floor(estimator: str) -> Float[np.ndarray, "N N"]:
        quantiles = np.quantile(shuffled_cka(grams, orders, estimator), quantile, axis=0)
        np.fill_diagonal(quantiles, np.nan)
        return quantiles

    return CkaFloor(
        biased=cka(states, "biased"),
        debiased=cka(states, "debiased"),
        biased_floor=floor("biased"),
        debiased_floor=floor("debiased"),
        quantile=quantile,
        permutations=permutations,
        seed=seed,
    )
