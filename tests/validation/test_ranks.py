"""Rank correlations against scipy's, and within strata against a literal count."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from layerwave.validation.ranks import order


def correlation(coefficient, x, y, strata=None):
    strata = [np.arange(x.shape[-1])] if strata is None else strata
    return (order(coefficient, x, strata) * order(coefficient, y, strata)).sum(axis=-1)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [3, 7, 24])
def test_scipy_agrees(n, ties):
    rng = np.random.default_rng(n)
    x, y = (rng.normal(size=(5, n)) if not ties else rng.integers(0, 3, size=(5, n)).astype(float) for _ in range(2))
    x[:, :2], y[:, :2] = [0.0, 1.0], [2.0, 1.0]  # none is constant
    for name, literal in (("spearman", spearmanr), ("kendall", kendalltau)):
        expected = [literal(a, b).statistic for a, b in zip(x, y, strict=True)]
        np.testing.assert_allclose(correlation(name, x, y), expected, atol=1e-12)


def test_only_the_order_counts():
    x, y = np.random.default_rng(0).normal(size=(2, 9))
    for name in ("spearman", "kendall"):
        np.testing.assert_allclose(correlation(name, np.exp(x), y), correlation(name, x, y), atol=1e-12)
        np.testing.assert_allclose(correlation(name, -x, y), -correlation(name, x, y), atol=1e-12)
        assert correlation(name, x, x) == pytest.approx(1)


def test_what_is_constant_correlates_with_nothing():
    x = np.arange(4.0)
    for name in ("spearman", "kendall"):
        assert correlation(name, x, np.full(4, 7.0)) == 0


def test_within_strata_no_pair_of_two_strata_counts():
    """Kendall's: concordant minus discordant pairs of one stratum, over the geometric mean of untied ones."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 4, size=(2, 12)).astype(float)
    strata = [np.arange(5), np.arange(5, 7), np.arange(7, 12)]
    pairs = [pair for stratum in strata for pair in combinations(stratum.tolist(), 2)]
    signs = np.array([[np.sign(v[i] - v[j]) for i, j in pairs] for v in (x, y)])
    expected = signs[0] @ signs[1] / np.sqrt((signs[0] ** 2).sum() * (signs[1] ** 2).sum())
    assert correlation("kendall", x, y, strata) == pytest.approx(expected)
    shifted = x + np.repeat([0, 100, -50], [5, 2, 5])  # what differs between strata is not seen
    for name in ("spearman", "kendall"):
        assert correlation(name, shifted, y, strata) == pytest.approx(correlation(name, x, y, strata))
        assert correlation(name, shifted, y) != pytest.approx(correlation(name, x, y))
