"""The definitions done as they are written, in numpy and float64: what layerwave's results have to equal."""

from itertools import product

import numpy as np
from jaxtyping import Float, Float64, Int


def entropy_by_svd(states: Float[np.ndarray, "N B D"], layers: Int[np.ndarray, " m"], *, vectors: bool) -> float:
    """`S_1` in nats of the concatenated layers from their singular values; with `vectors` by the SVD that has them."""
    Z = np.concatenate([states[layer] for layer in layers], axis=1)
    sigma = np.linalg.svd(Z, full_matrices=False)[1] if vectors else np.linalg.svd(Z, compute_uv=False)
    p = sigma**2 / np.sum(sigma**2)
    p = p[p > 0]
    return float(-np.sum(p * np.log(p)))


def cka_of_pair(X: Float[np.ndarray, "B D"], Y: Float[np.ndarray, "B E"]) -> float:
    """Biased linear CKA of two states, from their Grams (Kornblith et al. 2019)."""
    H = np.eye(len(X)) - 1 / len(X)
    K, L = H @ (X @ X.T) @ H, H @ (Y @ Y.T) @ H
    return float(np.sum(K * L) / (np.linalg.norm(K) * np.linalg.norm(L)))


def cka_by_pairs(states: Float[np.ndarray, "N B D"]) -> Float64[np.ndarray, "N N"]:
    """Biased CKA of all ordered pairs, each by itself."""
    return np.array([[cka_of_pair(X, Y) for Y in states] for X in states])


def conditional_by_pairs(
    states: Float[np.ndarray, "N B D"], layers: Int[np.ndarray, " m"], pairs: Int[np.ndarray, "P 2"]
) -> Float64[np.ndarray, " P"]:
    """`CKA(Z_{L∪i}, Z_{L∪j})` of given pairs `i, j`, from concatenations."""

    def joined(layer: int) -> np.ndarray:
        return np.concatenate([states[l] for l in sorted({*layers.tolist(), layer})], axis=1)

    return np.array([cka_of_pair(joined(i), joined(j)) for i, j in pairs.tolist()])


def conditional_by_grams(
    states: Float[np.ndarray, "N B D"], layers: Int[np.ndarray, " m"]
) -> Float64[np.ndarray, "N N"]:
    """The same of all pairs, with the Gram of each concatenation formed once."""
    H = np.eye(states.shape[1]) - 1 / states.shape[1]
    grams = []
    for layer in range(len(states)):
        Z = np.concatenate([states[l] for l in sorted({*layers.tolist(), layer})], axis=1)
        grams.append(H @ (Z @ Z.T) @ H)
    M = np.empty((len(states), len(states)))
    for i, j in product(range(len(states)), repeat=2):
        M[i, j] = np.sum(grams[i] * grams[j]) / (np.linalg.norm(grams[i]) * np.linalg.norm(grams[j]))
    return M
