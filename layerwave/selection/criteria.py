"""What a set of layers can be scored by: one factory a criterion.

All read the block-averaged states but `acceptance`, which reads the token sample.

A factory takes `(calibration, alpha, weighting)` and returns the scoring function of sets. `CRITERIA` names those of
layerwave; `CRITERIA["mine"] = factory` adds one to a program, and the entry-point group `layerwave.criteria` of an
installed package adds one to the command line too:

    [project.entry-points."layerwave.criteria"]
    mine = "my_package:my_factory"
"""

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Integer

from layerwave.calibration import Calibration
from layerwave.calibration.artifact import check_layers as check_states
from layerwave.errors import LayerwaveError
from layerwave.kernels import (
    cka,
    coding_rate,
    effective_rank,
    gram,
    relevance_redundancy,
    set_entropy,
    set_log_det,
    set_spectra,
)
from layerwave.selection.acceptance import acceptance_criterion

# A criterion scores a batch of sorted sets of one size: integers (M, m) -> floats (M,), greater is better.
Criterion: TypeAlias = Callable[[np.ndarray], np.ndarray]

ENTRY_POINTS = "layerwave.criteria"


def layer_states(calibration: Calibration, weighting: str = "raw") -> Float[np.ndarray, "N B D"]:
    """The block-averaged states of every layer in float64, weighted.

    `raw` leaves them as they are (the paper); `trace` divides each layer by the root of its Gram's trace, so
    that every layer weighs the same in a concatenation. Raises `LayerwaveError` for another weighting and for a
    layer that is all zero or not finite.
    """
    states = calibration.states
    check_states(np.abs(states).max(axis=(1, 2)))
    states = states.astype(np.float64)
    if weighting == "raw":
        return states
    if weighting == "trace":
        return states / np.linalg.norm(states, axis=(1, 2), keepdims=True)
    raise LayerwaveError(f"unknown weighting {weighting!r}: choose raw or trace")


def in_few_shapes(criterion: Criterion) -> Criterion:
    """Pads batches to 64 or another power of two, from 1,024 on to a sixteenth of one, so that few shapes compile."""

    @functools.wraps(criterion)
    def padded(sets: Integer[np.ndarray, "M m"]) -> Float[np.ndarray, "M"]:
        power = max(64, 1 << (len(sets) - 1).bit_length())
        missing = -len(sets) % (power if power <= 1024 else power // 16)
        return criterion(np.pad(sets, ((0, missing), (0, 0)), mode="edge"))[: len(sets)]

    return padded


def entropy_criterion(calibration: Calibration, alpha: float = 1.0, weighting: str = "raw") -> Criterion:
    """Matrix entropy `S_α` (nats) of the concatenated layers (paper eq. 4-6), from float64 Grams."""
    grams = gram(layer_states(calibration, weighting))

    @in_few_shapes
    def entropy(sets):
        return set_entropy(grams, sets, alpha)

    return entropy


def effective_rank_criterion(calibration: Calibration, alpha: float = 1.0, weighting: str = "raw") -> Criterion:
    """Effective rank of the concatenated layers, `exp` of the entropy of their singular values; `alpha` is not used.

    Source: Roy and Vetterli, EUSIPCO 2007; as a score of representations: RankMe, arXiv 2210.02885.
    """
    grams = gram(layer_states(calibration, weighting))

    @in_few_shapes
    def effective_rank_of_sets(sets):
        return effective_rank(set_spectra(grams, sets))

    return effective_rank_of_sets


def participation_ratio_criterion(calibration: Calibration, alpha: float = 1.0, weighting: str = "raw") -> Criterion:
    """Participation ratio `(Σ λ)² / Σ λ² = exp(S_2)` of the concatenated layers; `alpha` is not used.

    It orders sets as the entropy of `alpha = 2` does, in units of dimensions. Of the Gram, which is not centred; the
    ratio of a covariance is another number.

    Source: Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", bioRxiv 214262, 2017.
    """
    grams = gram(layer_states(calibration, weighting))

    @in_few_shapes
    def participation_ratio(sets):
        return np.exp(set_entropy(grams, sets, 2.0))

    return participation_ratio


def coding_rate_criterion(
    calibration: Calibration, alpha: float = 1.0, weighting: str = "raw", *, distortion: int | float = 0.5
) -> Criterion:
    """Rate `½ log det(I + D / (B ε²) · K_L / u)` (nats) that codes the concatenated layers; `alpha` is not used.

    The unit `u = Σ_l tr K_l / (N B)` is the mean squared norm of a token over all layers, so that a common factor of
    the states changes nothing; `distortion` is `ε²` in this unit: the squared error allowed a token (decision: half of
    its mean squared norm). Larger sets never score less, and the score is submodular: greedy search is within 1 - 1/e
    of the optimum (Nemhauser, Wolsey and Fisher 1978), which no beam has for the entropy.

    Raises `LayerwaveError` for a distortion that is not positive.

    Source: Ma et al., TPAMI 2007; Yu et al., arXiv 2006.08558.
    """
    if not 0 < distortion < np.inf:
        raise LayerwaveError(f"distortion is {distortion}: give a positive share of a token's mean squared norm")
    grams = gram(layer_states(calibration, weighting))
    num_layers, block, features = calibration.states.shape
    unit = np.trace(grams, axis1=1, axis2=2).sum() / (num_layers * block)
    scale = float(features / (block * distortion * unit))

    @in_few_shapes
    def rate(sets):
        return coding_rate(set_spectra(grams, sets), scale=scale)

    return rate


def dpp_criterion(
    calibration: Calibration, alpha: float = 1.0, weighting: str = "raw", *, ridge: int | float = 1e-6
) -> Criterion:
    """`log det(M_L + τ I)` of the debiased CKA between the layers of a set: diversity alone, at most 0 (to `m τ`).

    Debiased CKA is a correlation of U-centred Grams under their Frobenius product, hence positive semidefinite; a
    violation beyond rounding is an error. Copies make it singular: `ridge` is `τ`, which leaves a set with a copy at
    about `log τ` and others as they are. All single layers score alike, so that a beam narrower than the target has
    seeds without a reason: use `beam >= N`, or the exhaustive method. CKA knows no scale and no order: `alpha` and
    `weighting` are not used.

    Raises `LayerwaveError` for a negative ridge, and as `cka` does.

    Source: Kulesza and Taskar, arXiv 1207.6083; Gillenwater, Kulesza and Taskar, NeurIPS 2012 (MAP).
    """
    if not 0 <= ridge < np.inf:
        raise LayerwaveError(f"ridge is {ridge}: it must not be negative")
    similarity = cka(layer_states(calibration, weighting), "debiased")

    @in_few_shapes
    def log_det(sets):
        return set_log_det(similarity, sets, ridge=ridge)

    return log_det


def mrmr_criterion(
    calibration: Calibration, alpha: float = 1.0, weighting: str = "raw", *, penalty: int | float = 1.0
) -> Criterion:
    """Mean debiased CKA of a set's layers with the last layer, minus `penalty` times their mean CKA in pairs.

    Relevance is likeness to what the head reads, so a single layer is the last one, of relevance 1. `alpha` and
    `weighting` are not used. Raises `LayerwaveError` as `cka` does.

    Source: minimum redundancy, maximum relevance of Peng, Long and Ding, TPAMI 2005, with CKA for mutual information.
    """
    similarity = cka(layer_states(calibration, weighting), "debiased")

    @in_few_shapes
    def relevance_minus_redundancy(sets):
        return relevance_redundancy(similarity, sets, similarity[-1], penalty=penalty)

    return relevance_minus_redundancy


CRITERIA: dict[str, Callable[[Calibration, float, str], Criterion]] = {
    "entropy": entropy_criterion,
    "acceptance": acceptance_criterion,
    "effective_rank": effective_rank_criterion,
    "participation_ratio": participation_ratio_criterion,
    "coding_rate": coding_rate_criterion,
    "dpp": dpp_criterion,
    "mrmr": mrmr_criterion,
}


def criterion_factory(name: str) -> Callable[[Calibration, float, str], Criterion]:
    """The factory of this name: from `CRITERIA`, else from an installed package.

    Raises `LayerwaveError` for an unknown name and for an entry point that cannot be imported.
    """
    if name in CRITERIA:
        return CRITERIA[name]
    installed = entry_points(group=ENTRY_POINTS)
    if name not in installed.names:
        known = ", ".join([*CRITERIA, *sorted(installed.names)])
        raise LayerwaveError(
            f"unknown criterion {name!r}: choose from {known}, give a function, or add a factory to "
            "layerwave.selection.CRITERIA"
        )
    try:
        return installed[name].load()
    except (ImportError, AttributeError) as error:
        raise LayerwaveError(
            f"the criterion {name} = {installed[name].value} cannot be imported ({error}): mend its package"
        ) from error
