"""Grams, eigenvalues, matrix entropies and set entropies against singular values in float64."""

import json
import logging
import math
from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwave.errors import LayerwaveError
from layerwave.kernels import eigenvalues, gram, matrix_entropy, set_entropy
from layerwave.kernels.entropy import _stream_sets

ORDERS = (1.0, 1.001, 1.2, 1.3, 2.0, 3.0, 10.0, math.inf)
ORDERS_BELOW_1 = (0.1, 0.5, 0.8, 0.999)


def literal_entropy(X, alpha):
    """`S_α` as it is written, from the singular values of X and in float64."""
    p = np.linalg.svd(np.asarray(X, np.float64), compute_uv=False) ** 2
    p = p[p > 0] / p.sum()
    if alpha == 1:
        return -np.sum(p * np.log(p))
    if alpha == math.inf:
        return -np.log(p.max())
    return np.log(np.sum(p**alpha)) / (1 - alpha)


def make_states(kind, seed=0, B=32, D=256):
    random = np.random.default_rng(seed)
    X = random.normal(size=(B, D))
    if kind == "low_rank":
        X = random.normal(size=(B, 3)) @ random.normal(size=(3, D))
    elif kind == "rank_1":
        X = random.normal(size=(B, 1)) @ random.normal(size=(1, D))
    elif kind == "massive_channel":
        X[:, 5] += 1e3
    elif kind == "sink_token":
        X[0] *= 300
    elif kind == "decaying":
        X *= 0.8 ** np.arange(D)
    return X.astype(np.float32)


KINDS = ("random", "low_rank", "rank_1", "massive_channel", "sink_token", "decaying")


# Known values


@pytest.mark.parametrize("alpha", [0.25, 1, 1.0001, 2, 5, math.inf])
def test_equal_eigenvalues_give_log_of_their_number(alpha):
    assert matrix_entropy(np.eye(32), alpha) == pytest.approx(math.log(32), abs=1e-12)


def test_dyadic_spectrum():
    K = np.diag([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    assert matrix_entropy(K, 1) == pytest.approx(1.75 * math.log(2), abs=1e-15)
    assert matrix_entropy(K, 2) == pytest.approx(-math.log(0.34375), abs=1e-15)
    assert matrix_entropy(K, math.inf) == pytest.approx(math.log(2), abs=1e-15)
    assert matrix_entropy(K, 0.5) == pytest.approx(1.298614, abs=1e-6)


@pytest.mark.parametrize("alpha", [1, 1.01, 2, 7, math.inf])
def test_one_direction_has_no_entropy(alpha):
    integers = np.outer(np.arange(1, 9), np.arange(1, 5)).astype(np.float32)
    assert matrix_entropy(gram(integers), alpha) == pytest.approx(0, abs=1e-12)


def test_published_values_of_peers(shared_data):
    """Table of values on which the peers agree (float64), below 1 and above; rows of zeros fill up small cases."""
    cases = json.loads((shared_data / "peer_values.json").read_text())["cases"]
    states = [np.array(case["X"]) for case in cases.values()]
    K = np.stack([np.pad(gram(X), (0, 32 - len(X))) for X in states])
    in_float32 = np.stack([np.pad(gram(X.astype(np.float32)), (0, 32 - len(X))) for X in states])
    references = [case["entropy"]["ref_float64"] for case in cases.values()]
    orders = [order for order in references[0] if float(order) > 0]
    assert len(orders) >= 11
    for order in orders:
        expected = np.array([float(reference[order]) for reference in references])
        # At order 0.5 the root of what rounding leaves of a zero eigenvalue (32 eps) counts.
        np.testing.assert_allclose(
            matrix_entropy(K, float(order)), expected, rtol=0, atol=2e-6 if order == "0.5" else 1e-9
        )
        if float(order) >= 1:
            np.testing.assert_allclose(matrix_entropy(in_float32, float(order)), expected, rtol=0, atol=1e-6)


# Against the literal definition


@pytest.mark.parametrize("kind", KINDS)
def test_float32_within_a_millionth(kind):
    for seed in range(3):
        X = make_states(kind, seed)
        K = gram(X)
        assert K.dtype == np.float32
        for alpha in ORDERS:
            entropy = matrix_entropy(K, alpha)
            assert entropy.dtype == np.float32
            assert float(entropy) == pytest.approx(literal_entropy(X, alpha), abs=1e-6), alpha


@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_exact(kind):
    X = make_states(kind).astype(np.float64)
    K = gram(X)
    assert isinstance(K, np.ndarray)
    assert K.dtype == np.float64
    for alpha in ORDERS:
        assert float(matrix_entropy(K, alpha)) == pytest.approx(literal_entropy(X, alpha), abs=1e-12), alpha


@pytest.mark.parametrize("kind", ["random", "massive_channel", "sink_token", "decaying"])
def test_orders_below_one_of_float64_grams(kind):
    X = make_states(kind, B=16).astype(np.float64)
    for alpha in ORDERS_BELOW_1:
        assert float(matrix_entropy(gram(X), alpha)) == pytest.approx(literal_entropy(X, alpha), abs=1e-6), alpha


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_digits_are_lost_near_order_one(dtype):
    """`S_α = S_1 - (α-1)/2 Var(log p) + O((α-1)²)` holds to rounding at every distance from 1."""
    X = make_states("random").astype(dtype)
    p = np.linalg.svd(X.astype(np.float64), compute_uv=False) ** 2
    p /= p.sum()
    at_one = -p @ np.log(p)
    slope = -(p @ np.log(p) ** 2 - at_one**2) / 2
    for step in (1e-3, 1e-6, 1e-9, 1e-12, 1e-15):
        for alpha in (1 + step, 1 - step) if dtype == np.float64 else (1 + step,):
            entropy = float(matrix_entropy(gram(X), alpha))
            expected = at_one + slope * (alpha - 1)
            assert entropy == pytest.approx(expected, abs=step**2 + 8 * float(np.finfo(dtype).eps)), alpha


def test_very_large_orders_reach_the_limit():
    K = gram(make_states("random"))
    limit = float(matrix_entropy(K, math.inf))
    for alpha in (1e6, 1e12, 1e30, 1e300):
        assert float(matrix_entropy(K, alpha)) == pytest.approx(limit, abs=4 / alpha + 1e-6)


def test_jax_arrays_keep_their_precision():
    """Device arrays are not widened: what float32 products cost is bounded by rounding (B eps log(1/eps))."""
    for kind in KINDS:
        X = make_states(kind)
        entropy = jax.jit(lambda X: matrix_entropy(gram(X)))(jnp.asarray(X))
        assert entropy.dtype == jnp.float32
        assert float(entropy) == pytest.approx(literal_entropy(X, 1), abs=32 * 2**-24 * math.log(2**24)), kind


def test_gram_of_half_precision_and_integers_is_float32():
    X = np.full((4, 2560), 8.0)
    for dtype in (np.float16, jnp.bfloat16, np.int32):
        K = gram(jnp.asarray(X, dtype))
        assert K.dtype == jnp.float32
        np.testing.assert_array_equal(K, np.full((4, 4), 64 * 2560.0))  # overflows float16


def test_gram_is_of_rows_and_in_their_units():
    rows = np.array([[1, 2], [3, 4], [0, -1]])
    products = [[5, 11, -2], [11, 25, -4], [-2, -4, 1]]
    for K in (gram(rows), gram(jnp.asarray(rows)), jax.jit(gram)(rows)):
        np.testing.assert_array_equal(K, np.float32(products))
        assert K.dtype == np.float32


def test_gram_is_symmetric_and_additive():
    X, Y = make_states("massive_channel").astype(np.float64), make_states("random", 1).astype(np.float64)
    K = gram(np.concatenate([X, Y], axis=1))
    np.testing.assert_array_equal(K, K.T)
    np.testing.assert_allclose(K, gram(X) + gram(Y), rtol=1e-14)


# Eigenvalues


def test_eigenvalues():
    K = gram(np.stack([make_states(kind) for kind in KINDS]).astype(np.float64))
    values = eigenvalues(K)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(K), rtol=0, atol=1e-12 * np.abs(K).max())
    with jax.enable_x64(True):
        traced = jax.jit(jax.vmap(eigenvalues))(jnp.asarray(K))
        assert traced.dtype == jnp.float64
        np.testing.assert_array_equal(np.asarray(traced), values)


def test_eigenvalues_of_a_matrix_with_nan_are_nan_and_of_its_neighbours_are_not():
    K = np.stack([np.eye(4, dtype=np.float32)] * 4)
    K[1, 0, 2], K[2, 1, 1], K[3, 3, 3] = np.nan, np.inf, -np.inf
    values = eigenvalues(K)
    np.testing.assert_array_equal(values[0], np.ones(4))
    assert np.isnan(values[1:]).all()
    assert np.isnan(jax.jit(eigenvalues)(jnp.asarray(K))[1:]).all()


# Properties


spectra = st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=8)


@given(spectra, st.sampled_from(ORDERS_BELOW_1 + ORDERS), st.sampled_from(ORDERS_BELOW_1 + ORDERS))
@settings(max_examples=100, deadline=None)
def test_entropy_lies_between_0_and_log_rank_and_falls_with_the_order(spectrum, alpha, beta):
    K = np.diag(np.pad(spectrum, (0, 8 - len(spectrum))))
    low, high = (float(matrix_entropy(K, order)) for order in (max(alpha, beta), min(alpha, beta)))
    assert -1e-12 <= low <= high + 1e-12
    assert high <= math.log(len(spectrum)) + 1e-12


@pytest.mark.parametrize("alpha", ORDERS)
def test_invariances(alpha):
    random = np.random.default_rng(3)
    X = make_states("decaying", B=8, D=16).astype(np.float64)
    rotation, _ = np.linalg.qr(random.normal(size=(16, 16)))
    entropy = matrix_entropy(gram(X), alpha)
    for other in (
        X @ rotation,
        X * 1e-4,
        X * 1e4,
        random.permutation(X, axis=0),
        random.permutation(X, axis=1),
        np.pad(X, ((0, 0), (0, 5))),
        np.concatenate([X, X, X], axis=1),
    ):
        np.testing.assert_allclose(matrix_entropy(gram(other), alpha), entropy, rtol=0, atol=1e-12)


def test_block_diagonal_grams_split_into_weights_and_parts():
    X, Y = make_states("random", 1, B=8), make_states("decaying", 2, B=8)
    K = np.zeros((16, 16))
    K[:8, :8], K[8:, 8:] = gram(X), gram(Y)
    w = np.array([np.trace(K[:8, :8]), np.trace(K[8:, 8:])]) / np.trace(K)
    parts = [literal_entropy(X, 1), literal_entropy(Y, 1)]
    assert float(matrix_entropy(K)) == pytest.approx(w @ parts - w @ np.log(w), abs=1e-6)


@pytest.mark.parametrize("alpha", [1, 1.5, 2, math.inf])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_no_overflow_and_no_underflow(alpha, scale):
    K = gram(make_states("random"))
    np.testing.assert_allclose(
        matrix_entropy(jnp.asarray(K * np.float32(scale)), alpha), matrix_entropy(K, alpha), atol=1e-6
    )


def test_traced_equals_plain():
    K = jnp.asarray(gram(np.stack([make_states(kind) for kind in KINDS])))
    for alpha in (1, 2):
        plain = matrix_entropy(K, alpha)
        traced = jax.jit(jax.vmap(partial(matrix_entropy, alpha=alpha)))(K)
        np.testing.assert_allclose(traced, plain, rtol=0, atol=1e-6)
        np.testing.assert_allclose(matrix_entropy(K[None], alpha), plain[None], rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 1, 1.1, 2, 3, math.inf])
def test_gradient_is_the_slope(alpha):
    K = gram(make_states("decaying", B=6, D=12).astype(np.float64))
    direction = gram(make_states("random", 1, B=6, D=12).astype(np.float64))
    step = 1e-6 * np.trace(K)
    slope = (matrix_entropy(K + step * direction, alpha) - matrix_entropy(K - step * direction, alpha)) / (2 * step)
    with jax.enable_x64(True):
        gradient = np.asarray(jax.grad(lambda K: matrix_entropy(K, alpha))(jnp.asarray(K)))
    assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("alpha", [1.0, 1.1, 2.0, 3.0, math.inf])
def test_gradients_are_finite_at_repeated_and_at_zero_eigenvalues(alpha):
    K = jnp.asarray([np.eye(5), np.diag([1.0, 1, 0, 0, 0]), np.ones((5, 5))], jnp.float32)
    gradient = jax.jit(jax.grad(lambda K: jnp.sum(matrix_entropy(K, alpha))))(K)
    assert jnp.isfinite(gradient).all()
    if alpha != math.inf:  # equal eigenvalues are the maximum
        np.testing.assert_allclose(gradient[0], np.zeros((5, 5)), atol=1e-6)


# Sets


@pytest.fixture(scope="module")
def layers():
    random = np.random.default_rng(7)
    return random.normal(size=(9, 16, 24)) * 2.0 ** random.integers(-4, 5, size=(9, 1, 1)) + random.normal(
        size=(1, 16, 24)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("alpha", [0.5, 1, 2, math.inf])
def test_set_entropy_is_the_entropy_of_the_concatenation(layers, size, alpha):
    sets = np.array(list(combinations(range(9), size)))
    expected = [literal_entropy(np.concatenate(layers[list(chosen)], axis=1), alpha) for chosen in sets]
    np.testing.assert_allclose(
        set_entropy(gram(layers), sets, alpha), expected, rtol=0, atol=1e-7 if alpha < 1 else 1e-12
    )
    if alpha >= 1:
        in_float32 = set_entropy(gram(layers.astype(np.float32)), sets, alpha)
        assert in_float32.dtype == np.float32
        np.testing.assert_allclose(in_float32, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_sets_score_bitwise_equal(layers, dtype):
    random = np.random.default_rng(0)
    sets = np.array(list(combinations(range(9), 4)))
    shuffled = random.permutation(random.permuted(np.concatenate([sets] * 3), axis=1))
    for K in (gram(layers.astype(dtype)), jnp.asarray(gram(layers.astype(np.float32)))):
        scores = np.asarray(set_entropy(K, shuffled, chunk=50))
        by_set = {}
        for chosen, score in zip(np.sort(shuffled, axis=1).tolist(), scores, strict=True):
            by_set.setdefault(tuple(chosen), set()).add(score.tobytes())
        assert all(len(scores) == 1 for scores in by_set.values())


def test_chunks_do_not_change_scores(layers):
    sets = np.array(list(combinations(range(9), 3)))
    K = gram(layers)
    expected = set_entropy(K, sets)
    for chunk in (1, 7, 1000):
        np.testing.assert_allclose(set_entropy(K, sets, chunk=chunk), expected, rtol=0, atol=1e-14)
    assert set_entropy(K, sets[:0]).shape == (0,)


def test_memory_does_not_grow_with_the_number_of_sets():
    K = jax.ShapeDtypeStruct((80, 32, 32), np.float32)

    def scratch(count):
        sets = jax.ShapeDtypeStruct((count, 3), np.int32)
        compiled = _stream_sets.lower(K, sets, 1.0, 1024).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    indices_and_scores = 2 * (82_160 - 7_140) * 4 * 4
    assert scratch(82_160) <= scratch(7_140) + indices_and_scores


def test_mixture_bound(layers):
    """`Σ w_l S_1(l) <= S_1(L) <= Σ w_l S_1(l) + H(w)` for the shares `w` of the trace."""
    K = gram(layers)
    single = matrix_entropy(K)
    for chosen in combinations(range(9), 3):
        w = np.trace(K[list(chosen)], axis1=1, axis2=2)
        w = w / w.sum()
        score = set_entropy(K, np.array([chosen]))[0]
        mixed = w @ single[list(chosen)]
        assert mixed - 1e-12 <= score <= mixed - w @ np.log(w) + 1e-12


def test_set_entropy_inside_a_trace(layers):
    sets = np.array([[3, 1], [0, 8]])
    K = gram(layers.astype(np.float32))
    plain = set_entropy(K, sets)
    np.testing.assert_allclose(jax.jit(set_entropy)(K, sets), plain, rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        jax.vmap(lambda chosen: set_entropy(K, chosen[None])[0])(jnp.asarray(sets)), plain, atol=1e-6
    )


def test_equal_shapes_compile_once(layers, caplog):
    K, sets = gram(layers.astype(np.float32)), np.array(list(combinations(range(9), 2)))

    def run(offset):
        matrix_entropy(gram(layers + offset))
        set_entropy(K + np.float32(offset), sets[::-1])
        set_entropy(jnp.asarray(K), sets)

    run(0)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run(1)
        assert not [record.message for record in caplog.records if "ompil" in record.message]
        set_entropy(jnp.asarray(K[:7]), sets[sets[:, 1] < 7])
        assert [record.message for record in caplog.records if "ompil" in record.message]


# Faults


@pytest.mark.parametrize("alpha", [1, 1.1, 2, 5, math.inf])
def test_a_zero_or_broken_gram_gives_nan_and_leaves_its_neighbours_alone(alpha):
    K = np.stack([np.eye(4, dtype=np.float32)] * 3)
    K[0], K[1, 2, 2] = 0, np.nan
    for entropy in (matrix_entropy(K, alpha), jax.jit(lambda K: matrix_entropy(K, alpha))(K)):
        np.testing.assert_array_equal(np.isnan(entropy), [True, True, False])


@pytest.mark.parametrize("alpha", [0, -1.0, math.nan, -math.inf])
def test_orders_have_to_be_positive(alpha):
    with pytest.raises(LayerwaveError, match=f"alpha={alpha}.*greater than 0"):
        matrix_entropy(np.eye(3), alpha)
    with pytest.raises(LayerwaveError, match=f"alpha={alpha}.*greater than 0"):
        set_entropy(np.eye(3)[None], np.array([[0]]), alpha)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_orders_below_one_need_float64(array):
    K = array(np.eye(3, dtype=np.float32))
    with pytest.raises(LayerwaveError, match=r"alpha=0\.5 with a float32 Gram.*float64"):
        matrix_entropy(K, 0.5)
    with pytest.raises(LayerwaveError, match=r"alpha=0\.5 with a float32 Gram.*float64"):
        jax.jit(lambda K: set_entropy(K[None], np.array([[0]]), 0.5))(K)


def test_float64_is_never_narrowed_in_silence():
    K = gram(np.eye(3))
    with pytest.raises(LayerwaveError, match="float64"):
        jax.jit(lambda sets: set_entropy(K[None], sets))(np.array([[0]]))
    with jax.enable_x64(True):
        assert jax.jit(lambda sets: set_entropy(K[None], sets))(np.array([[0]])).dtype == jnp.float64
        device = jnp.asarray(K)
    with pytest.raises(LayerwaveError, match="float64"):
        matrix_entropy(device)


def test_faulty_sets_are_named():
    K = np.stack([np.eye(2)] * 5)
    with pytest.raises(LayerwaveError, match=r"layer 5 in the set \[0, 5\] is out of range: expected 0 to 4"):
        set_entropy(K, np.array([[1, 2], [0, 5], [6, 1]]))
    with pytest.raises(LayerwaveError, match=r"layer -1 in the set \[3, -1\] is out of range"):
        set_entropy(K, np.array([[3, -1]]))
    with pytest.raises(LayerwaveError, match=r"layer 2 is repeated in the set \[2, 1, 2\]"):
        set_entropy(K, np.array([[0, 1, 2], [2, 1, 2], [3, 3, 4]]))  # the first of several
    with pytest.raises(LayerwaveError, match="size 0"):
        set_entropy(K, np.zeros((3, 0), int))
    with pytest.raises(LayerwaveError, match="chunk=0"):
        set_entropy(K, np.array([[0]]), chunk=0)
