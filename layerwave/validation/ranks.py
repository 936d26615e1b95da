"""Rank correlations of many scores at once.

Spearman's and Kendall's coefficients are one thing (Daniels 1944): the cosine between what two orders say of each thing
(its centred rank) or of each pair (the sign of its difference). Ties have mid-ranks and the sign 0, which gives
Spearman's ρ with ties and Kendall's τ-b. To correlate *within* strata, what is said of each of them is laid side by
side: no thing is compared with one of another stratum.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

Strata: TypeAlias = Sequence[np.ndarray]
"""Places of the things that are compared with each other: integers, each place in one stratum at most."""


def centred_ranks(values: Float[np.ndarray, "*r n"]) -> Float[np.ndarray, "*r n"]:
    """Mid-ranks less their mean, as shares of n, so that strata of different sizes weigh by their numbers."""
    return (rankdata(values, axis=-1) - (values.shape[-1] + 1) / 2) / values.shape[-1]


def pair_signs(values: Float[np.ndarray, "*r n"]) -> Float[np.ndarray, "*r n*(n-1)//2"]:
    """Sign of the difference of every pair."""
    first, second = np.triu_indices(values.shape[-1], 1)
    return np.sign(values[..., first] - values[..., second])


COEFFICIENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"spearman": centred_ranks, "kendall": pair_signs}


def order(coefficient: str, values: Float[np.ndarray, "*r n"], strata: Strata) -> Float[np.ndarray, "*r f"]:
    """What the values say of the order within each stratum, of length 1, or 0 where all are equal.

    The correlation of two orders is their inner product; an order that says nothing correlates 0 with any.
    """
    said = np.concatenate([COEFFICIENTS[coefficient](values[..., stratum]) for stratum in strata], axis=-1)
    length = np.linalg.norm(said, axis=-1, keepdims=True)
    return said / np.where(length > 0, length, 1)
