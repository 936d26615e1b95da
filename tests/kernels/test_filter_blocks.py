"""Token entropy, the top fraction, sinks and block sums against loops in numpy."""

import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.errors import LayerwaveError
from layerwave.kernels import block_matrix, block_sums, sink_mask, token_entropy, top_fraction
from layerwave.kernels.filter import _token_entropy, entropy_by_positions, entropy_by_vocabulary, kept_counts


def literal_token_entropy(normed, head):
    logits = normed.astype(np.float64) @ head.astype(np.float64).T
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return -np.sum(np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0), axis=1)


def literal_top_fraction(entropy, valid, rho):
    positions = [t for t in range(len(entropy)) if valid[t]]
    k = max(1, math.ceil(Fraction(str(rho)) * len(positions)))
    keep = np.zeros(len(entropy), bool)
    keep[sorted(positions, key=lambda t: (-entropy[t], t))[:k]] = True
    return keep


# Token entropy


@pytest.fixture(scope="module")
def model():
    random = np.random.default_rng(0)
    scale = np.geomspace(0.01, 30, 37)[:, None]
    return (random.normal(size=(37, 24)) * scale).astype(np.float32), random.normal(size=(500, 24)).astype(np.float32)


@pytest.mark.parametrize("chunk", [1, 8, 37, 128])
def test_token_entropy(model, chunk):
    entropy = token_entropy(*model, chunk=chunk)
    assert entropy.dtype == jnp.float32
    np.testing.assert_allclose(entropy, literal_token_entropy(*model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", [entropy_by_positions, entropy_by_vocabulary])  # of accelerators, and of CPUs
@pytest.mark.parametrize("chunk", [1, 7, 100, 512])
def test_both_ways_of_cutting(model, way, chunk):
    entropy = jax.jit(partial(way, chunk=chunk))(*model)
    np.testing.assert_allclose(entropy, literal_token_entropy(*model), rtol=0, atol=1e-5)


def test_equal_logits_have_the_entropy_of_the_vocabulary(model):
    _, head = model
    np.testing.assert_allclose(token_entropy(np.zeros((3, 24), np.float32), head), math.log(500), rtol=1e-6)


@pytest.mark.parametrize("way", [entropy_by_positions, entropy_by_vocabulary])
def test_logits_of_minus_infinity_add_nothing(way):
    def entropy(*logits):
        return float(way(jnp.ones((1, 1)), jnp.array(logits)[:, None], chunk=1)[0])

    assert entropy(1.0, -math.inf, 1.0, -math.inf) == pytest.approx(math.log(2), abs=1e-7)
    assert entropy(-math.inf, 5.0, -math.inf) == 0
    assert entropy(1e30, -1e30, 0.0) == entropy(-1e30, 0.0, 1e30) == 0
    assert math.isnan(entropy(math.nan, 0.0))
    assert math.isnan(entropy(0.0, math.nan))


def test_half_precision_states_have_float32_logits(model):
    normed, head = (jnp.asarray(array, jnp.bfloat16) for array in model)
    exact = literal_token_entropy(np.asarray(normed, np.float32), np.asarray(head, np.float32))
    np.testing.assert_allclose(token_entropy(normed, head), exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(token_entropy(np.asarray(normed, np.float32), head), exact, rtol=0, atol=1e-5)


def test_logits_exist_for_one_chunk_at_a_time():
    T, D, V = 2048, 64, 8192
    normed, head = jax.ShapeDtypeStruct((T, D), np.float32), jax.ShapeDtypeStruct((V, D), np.float32)
    scratch = _token_entropy.lower(normed, head, 32).compile().memory_analysis().temp_size_in_bytes
    assert scratch < 4 * T * V / 4


def test_token_entropy_inside_a_trace(model):
    normed, head = model
    plain = token_entropy(normed, head)
    np.testing.assert_allclose(jax.jit(token_entropy)(normed, head), plain, atol=1e-6)
    batch = jnp.stack([normed, normed[::-1]])
    mapped = jax.vmap(lambda normed: token_entropy(normed, head, chunk=10))(batch)
    np.testing.assert_allclose(mapped, jnp.stack([plain, plain[::-1]]), atol=1e-5)


# Top fraction


@pytest.mark.parametrize(
    ("rho", "numerator", "denominator"),
    [(0.05, 1, 20), (0.07, 7, 100), (0.1, 1, 10), (0.3, 3, 10), (0.55, 11, 20), (0.7, 7, 10), (1.0, 1, 1), (1, 1, 1)],
)
def test_number_of_kept_tokens_for_every_length(rho, numerator, denominator):
    """`ceil(ρ n)` in whole numbers; in floats `ceil(0.07 * 100)` is 8 and `ceil(0.55 * 100)` is 56."""
    lengths = np.arange(4097)
    expected = np.maximum(1, -(-numerator * lengths // denominator))
    np.testing.assert_array_equal(kept_counts(4096, rho), expected)
    entropy = np.zeros(100, np.float32)
    for length in (1, 9, 10, 11, 30, 70, 100):
        assert top_fraction(entropy, np.arange(100) < length, rho).sum() == expected[length]


@pytest.mark.parametrize("rho", [0.1, 0.3, 0.5, 1.0])
def test_top_fraction(rho):
    random = np.random.default_rng(0)
    for T in (1, 2, 64):
        for _ in range(5):
            entropy = random.integers(0, 6, T).astype(np.float32)  # many ties
            valid = random.random(T) < 0.7
            valid[random.integers(T)] = True
            keep = top_fraction(entropy, valid, rho)
            np.testing.assert_array_equal(keep, literal_top_fraction(entropy, valid, rho))


def test_ties_go_to_the_earlier_position():
    keep = top_fraction(np.array([1, 2, 2, 2, 0], np.float32), np.ones(5, bool), 0.4)
    np.testing.assert_array_equal(keep, [False, True, True, False, False])


def test_padding_is_never_kept_and_never_counted():
    entropy = np.array([1, 3, 2, 9, np.nan, np.inf], np.float32)
    valid = np.array([True, True, True, False, False, False])
    np.testing.assert_array_equal(top_fraction(entropy, valid, 0.34), [False, True, True, False, False, False])
    np.testing.assert_array_equal(top_fraction(entropy, valid, 1.0), valid)
    assert not top_fraction(entropy, np.zeros(6, bool), 0.5).any()


def test_top_fraction_inside_a_trace():
    random = np.random.default_rng(1)
    entropy, valid = random.random((4, 20)).astype(np.float32), random.random((4, 20)) < 0.8
    mapped = jax.jit(jax.vmap(lambda e, v: top_fraction(e, v, 0.3)))(entropy, valid)
    np.testing.assert_array_equal(
        mapped, [literal_top_fraction(e, v, 0.3) for e, v in zip(entropy, valid, strict=True)]
    )


@pytest.mark.parametrize("rho", [0, -0.1, 1.01, math.nan])
def test_rho_is_a_fraction(rho):
    with pytest.raises(LayerwaveError, match=f"rho={rho}"):
        top_fraction(np.zeros(3, np.float32), np.ones(3, bool), rho)


# Sinks


def test_sink_mask():
    random = np.random.default_rng(0)
    for T in (1, 10):
        for seed in range(10):
            norms = random.lognormal(0, 1, (3, T)).astype(np.float32)
            valid = random.random(T) < 0.8
            valid[seed % T] = True
            median = np.median(norms[:, valid], axis=1)
            expected = valid & (norms > 1.5 * median[:, None]).any(axis=0)
            np.testing.assert_array_equal(sink_mask(norms, valid, 1.5), expected)
            mapped = jax.jit(jax.vmap(lambda n, v: sink_mask(n, v, 1.5)))(norms[None], valid[None])
            np.testing.assert_array_equal(mapped[0], expected)


def test_a_sink_in_one_layer_is_a_sink():
    norms = np.ones((4, 8), np.float32)
    norms[2, 5], norms[0, 6], norms[1, 7] = 10.5, 10.0, 1e6
    valid = np.arange(8) < 7  # position 7 is padding
    np.testing.assert_array_equal(sink_mask(norms, valid), np.arange(8) == 5)
    assert not sink_mask(norms, np.zeros(8, bool)).any()
    with pytest.raises(LayerwaveError, match="multiple=0"):
        sink_mask(norms, valid, 0)


# Blocks


@pytest.mark.parametrize("block", [1, 3, 8, 50])
def test_block_sums(block):
    random = np.random.default_rng(2)
    for kept in (0.0, 0.3, 1.0):
        keep = random.random(40) < kept
        states = random.normal(size=(5, 40, 6)).astype(np.float32)
        positions = np.flatnonzero(keep)
        expected, whole = np.zeros((5, block, 6)), len(positions) // block
        for b in range(whole):
            expected += states[:, positions[b * block : (b + 1) * block]]
        P, blocks = block_matrix(keep, block)
        assert P.shape == (block, 40)
        assert int(blocks) == whole
        np.testing.assert_array_equal(P.sum(axis=0) > 0, np.isin(np.arange(40), positions[: whole * block]))
        np.testing.assert_allclose(block_sums(P, states), expected, rtol=0, atol=1e-5)
        mapped, counts = jax.jit(jax.vmap(lambda keep: block_matrix(keep, block)))(keep[None])
        np.testing.assert_array_equal(mapped[0], P)
        assert counts.tolist() == [whole]


def test_block_sums_of_half_precision_are_float32():
    states = jnp.full((1, 600, 1), 1.0, jnp.bfloat16)
    P, blocks = block_matrix(np.ones(600, bool), 2)
    np.testing.assert_array_equal(block_sums(P, states)[0, :, 0], [300, 300])  # 256 + 1 is 256 in bfloat16
    assert int(blocks) == 300


def test_block_sums_keep_float64():
    states = np.random.default_rng(3).normal(size=(2, 12, 3))
    P, _ = block_matrix(np.ones(12, bool), 4)
    with jax.enable_x64(True):
        exact, single = block_sums(P, states), block_sums(P, states.astype(np.float32))
        assert (exact.dtype, single.dtype) == (jnp.float64, jnp.float32)
    np.testing.assert_allclose(exact, states[:, :4] + states[:, 4:8] + states[:, 8:], rtol=1e-15)


def test_faulty_settings():
    with pytest.raises(LayerwaveError, match="block=0"):
        block_matrix(np.ones(4, bool), 0)
    with pytest.raises(LayerwaveError, match="chunk=0"):
        token_entropy(np.zeros((2, 3), np.float32), np.zeros((4, 3), np.float32), chunk=0)
