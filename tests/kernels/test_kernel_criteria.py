"""Spectra, coding rate, effective rank, log-determinants, redundancy and shuffled CKA against plain numpy."""

from itertools import combinations

import jax
import numpy as np
import pytest

from layerwave.errors import LayerwaveError
from layerwave.kernels import (
    centred_gram,
    cka,
    coding_rate,
    effective_rank,
    gram,
    relevance_redundancy,
    set_log_det,
    set_spectra,
    shuffled_cka,
)

N, B, D = 6, 8, 5
PAIRS = np.array(list(combinations(range(N), 2)))


@pytest.fixture(scope="module")
def states():
    X = np.random.default_rng(3).normal(size=(N, B, D)) * np.geomspace(1, 9, N)[:, None, None]
    X[4] = X[1]
    return X


def concatenated(states, layers):
    return np.concatenate([states[layer] for layer in layers], axis=1)


def test_spectra_are_squared_singular_values_of_the_concatenation(states):
    spectra = set_spectra(gram(states), PAIRS, chunk=4)
    assert spectra.shape == (len(PAIRS), B)
    assert spectra.dtype == np.float64
    for layers, spectrum in zip(PAIRS, spectra, strict=True):
        sigma = np.linalg.svd(concatenated(states, layers), compute_uv=False)
        np.testing.assert_allclose(spectrum[::-1], sigma**2, rtol=1e-12, atol=1e-11)


def test_spectra_inside_a_jit_keep_float32(states):
    K = gram(states)
    traced = jax.jit(lambda K, sets: set_spectra(K, sets))(K.astype(np.float32), PAIRS.astype(np.int32))
    assert traced.dtype == np.float32
    np.testing.assert_allclose(traced, set_spectra(K, PAIRS), rtol=1e-4, atol=1e-3)


def test_spectra_refuse_sets_that_are_none(states):
    with pytest.raises(LayerwaveError, match="layer 6 in the set"):
        set_spectra(gram(states), np.array([[1, 6]]))
    with pytest.raises(LayerwaveError, match="chunk=0"):
        set_spectra(gram(states), PAIRS, chunk=0)


def test_coding_rate_is_half_the_log_determinant(states):
    rates = coding_rate(set_spectra(gram(states), PAIRS), scale=0.7)
    for layers, rate in zip(PAIRS, rates, strict=True):
        X = concatenated(states, layers)
        # On the side of the features: the determinant is the same.
        assert rate == pytest.approx(np.linalg.slogdet(np.eye(X.shape[1]) + 0.7 * X.T @ X)[1] / 2, rel=1e-12)
    spectra = set_spectra(gram(states), PAIRS[:4])
    batched = coding_rate(spectra.reshape(2, 2, -1), scale=0.7)
    np.testing.assert_allclose(batched.reshape(-1), rates[:4], rtol=1e-15)


def test_coding_rate_is_monotone_and_submodular(states):
    K = gram(states)

    def rate(*layers):
        return float(coding_rate(set_spectra(K, np.array([layers])), scale=0.3)[0])

    for a, b, c in combinations(range(N), 3):
        assert rate(a, b, c) >= rate(a, b) - 1e-12
        assert rate(a, b, c) - rate(a, b) <= rate(a, c) - rate(a) + 1e-12


def test_effective_rank_of_known_spectra():
    # Singular values 2 and 1: p = 2/3, 1/3, and not the 4/5, 1/5 of the entropy.
    two = np.exp(np.log(3) - 2 / 3 * np.log(2))
    spectra = np.array([[0.0, 1.0, 4.0], [3.0, 3.0, 3.0], [0.0, 0.0, 5.0]])
    np.testing.assert_allclose(effective_rank(spectra), [two, 3, 1])
    assert np.isnan(effective_rank(np.zeros(3)))


def test_effective_rank_does_not_count_rounding_as_rank():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(32, 3)) @ rng.normal(size=(3, 64))
    sigma = np.linalg.svd(X, compute_uv=False)[:3]
    p = sigma / sigma.sum()
    measured = effective_rank(set_spectra(gram(X[None]), np.array([[0]])))[0]
    assert measured == pytest.approx(np.exp(-np.sum(p * np.log(p))), rel=1e-12)


def test_log_det_of_submatrices(states):
    M = cka(states[[0, 1, 2, 3, 5]], "debiased")
    triples = np.array([[0, 2, 4], [4, 1, 3]])
    expected = [np.linalg.slogdet(M[np.ix_(s, s)] + 0.1 * np.eye(3))[1] for s in triples]
    np.testing.assert_allclose(set_log_det(M, triples, ridge=0.1), expected, rtol=1e-12)
    np.testing.assert_allclose(set_log_det(np.eye(4), np.array([[0, 3]])), [0], atol=1e-15)


def test_log_det_of_copies_needs_a_ridge(states):
    M, copies = cka(states, "debiased"), np.array([[1, 4]])
    assert set_log_det(M, copies)[0] < -30
    assert set_log_det(M, copies, ridge=1e-6)[0] == pytest.approx(np.log(2 + 1e-6) + np.log(1e-6), abs=1e-6)


def test_debiased_cka_is_positive_semidefinite():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        M = cka(rng.normal(size=(12, 5, 3)), "debiased")  # five tokens: U-centred Grams span 5 dimensions
        assert M.min() < 0
        assert np.linalg.eigvalsh(M)[0] > -1e-12


def test_log_det_refuses_what_is_no_covariance():
    with pytest.raises(LayerwaveError, match=r"eigenvalue -1 \(greatest 3\)"):
        set_log_det(np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([[0, 1]]))
    with pytest.raises(LayerwaveError, match="NaN"):
        set_log_det(np.array([[1.0, np.nan], [np.nan, 1.0]]), np.array([[0, 1]]))
    with pytest.raises(LayerwaveError, match="layer 1 is repeated"):
        set_log_det(np.eye(2), np.array([[1, 1]]))


def test_relevance_minus_redundancy(states):
    M = cka(states, "debiased")
    relevance = np.arange(N, dtype=np.float64)
    triples = np.array([[0, 2, 5], [1, 3, 4]])
    expected = [
        np.mean([relevance[l] for l in s]) - 0.5 * np.mean([M[a, b] for a, b in combinations(s, 2)]) for s in triples
    ]
    np.testing.assert_allclose(relevance_redundancy(M, triples, relevance, penalty=0.5), expected, rtol=1e-12)
    with pytest.raises(LayerwaveError, match="layer 6 in the set"):
        relevance_redundancy(M, np.array([[0, 6]]), relevance, penalty=0.5)
    np.testing.assert_array_equal(relevance_redundancy(M, np.arange(N)[:, None], relevance, penalty=3), relevance)


@pytest.mark.parametrize("estimator", ["biased", "debiased"])
def test_shuffling_grams_is_shuffling_tokens(states, estimator):
    rng = np.random.default_rng(1)
    orders = np.stack([[rng.permutation(B) for _ in range(N)] for _ in range(3)] + [[np.arange(B)] * N])
    shuffled = shuffled_cka(centred_gram(states), orders, estimator)
    for order, M in zip(orders, shuffled, strict=True):
        expected = cka(np.stack([X[o] for X, o in zip(states, order, strict=True)]), estimator)
        np.testing.assert_allclose(M, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(LayerwaveError, match="layer 2 is constant"):
        shuffled_cka(centred_gram(np.where(np.arange(N)[:, None, None] == 2, 1.0, states)), orders, "biased")
