"""CKA, conditional CKA and transitions against their definitions in float64 and against published values."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.errors import LayerwaveError
from layerwave.kernels import (
    centred_gram,
    cka,
    conditional_cka,
    conditional_cka_from_table,
    gram_table,
    gram_table_from_grams,
    shuffled_cka,
    transitions,
)

ESTIMATORS = ("biased", "debiased")


def literal_cka(X, Y, estimator="biased"):
    """Biased: `⟨HKH,HLH⟩` as it is written. Debiased: the sum `HSIC_1` of Song et al. 2012."""

    def hsic(K, L):
        n = len(K)
        if estimator == "biased":
            H = np.eye(n) - 1 / n
            return np.trace(K @ H @ L @ H)
        K, L = K - np.diag(np.diag(K)), L - np.diag(np.diag(L))
        cross = np.trace(K @ L) + K.sum() * L.sum() / ((n - 1) * (n - 2)) - 2 * (K @ L).sum() / (n - 2)
        return cross / (n * (n - 3))

    K, L = X @ X.T, Y @ Y.T
    return hsic(K, L) / np.sqrt(hsic(K, K) * hsic(L, L))


def make_layers(N=6, B=32, D=40, seed=0):
    """Layers that change slowly, with a jump in the middle, of very different norms."""
    random = np.random.default_rng(seed)
    walk = np.cumsum(random.normal(size=(N, B, D)) * np.where(np.arange(N) == N // 2, 3, 1)[:, None, None], axis=0)
    return walk * np.geomspace(1, 30, N)[:, None, None]


def pair(X, Y):
    """Two layers of 64 features: those that are zero change nothing."""
    return np.stack([np.pad(Z, ((0, 0), (0, 64 - Z.shape[1]))) for Z in (X, Y)])


# Known values


def test_published_values_of_the_demonstration():
    """Kornblith et al., representation_similarity/Demo.ipynb: 100 examples, 10 features, seed 1337."""
    random = np.random.RandomState(1337)
    X = random.randn(100, 10)
    Y = random.randn(100, 10) + X
    assert cka(pair(X, Y))[0, 1] == pytest.approx(0.55761, abs=5e-6)
    assert cka(pair(X, Y), "debiased")[0, 1] == pytest.approx(0.51346, abs=5e-6)


def test_diagonal_against_identity():
    X, Y = np.diag(np.sqrt([4, 2, 1, 1])), np.eye(4)
    np.testing.assert_allclose(cka(pair(X, Y))[0, 1], literal_cka(X, Y), atol=1e-14)


def test_values_on_which_the_peers_agree(shared_data):
    cases = json.loads((shared_data / "peer_values.json").read_text())["cases"]
    checked = 0
    for name, case in cases.items():
        states = pair(np.array(case["X"]), np.array(case["Y"]))
        for estimator, key in (("biased", "ref_biased_float64"), ("debiased", "ref_unbiased_float64")):
            expected = float(case["cka"][key])
            if np.isnan(expected):
                with pytest.raises(LayerwaveError):
                    cka(states, estimator)
                continue
            if name == "rogue_channel_+1000" and estimator == "debiased":
                # A channel that is 1000 higher for every token changes nothing; the reference lost 8 digits to it.
                expected = float(cases["gauss"]["cka"][key])
            assert cka(states, estimator)[0, 1] == pytest.approx(expected, abs=1e-9), (name, estimator)
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_all_pairs(estimator):
    layers = make_layers()
    M = cka(layers, estimator)
    assert isinstance(M, np.ndarray)
    assert M.dtype == np.float64
    expected = [[literal_cka(X, Y, estimator) for Y in layers] for X in layers]
    np.testing.assert_allclose(M, expected, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(np.diagonal(M), 1)
    np.testing.assert_array_equal(M, M.T)


def test_debiased_is_near_zero_for_independent_layers_where_biased_is_near_one():
    """32 tokens of 2560 independent features; one estimate has a spread of 0.05 (numerics of the reference table)."""
    layers = np.random.default_rng(0).normal(size=(8, 32, 2560)).astype(np.float32)
    others = ~np.eye(8, dtype=bool)
    assert cka(layers)[others].min() > 0.95
    debiased = cka(layers, "debiased")[others]
    assert abs(debiased.mean()) < 0.05
    assert debiased.min() < 0  # not clamped


# Invariances and outliers


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_invariances(estimator):
    random = np.random.default_rng(1)
    layers = make_layers()
    rotation, _ = np.linalg.qr(random.normal(size=(40, 40)))
    M = cka(layers, estimator)
    for other in (
        layers @ rotation,
        layers * 1e-4,
        layers * 1e4,
        layers * np.geomspace(1e-4, 1e4, 6)[:, None, None],
        layers + random.normal(size=(6, 1, 40)),
        layers[:, random.permutation(32)],
        layers[:, :, random.permutation(40)],
        np.concatenate([layers, np.zeros((6, 32, 3))], axis=2),
        np.concatenate([layers, layers], axis=2),
    ):
        np.testing.assert_allclose(cka(other, estimator), M, rtol=0, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_float32_states_and_a_massive_channel(estimator):
    """A channel at 1e5 in float32 states costs nothing but the rounding of the states themselves."""
    layers = make_layers()
    layers[:, :, 3] += 1e5
    rounded = layers.astype(np.float32)
    centred = rounded.astype(np.float64) - rounded.astype(np.float64).mean(axis=1, keepdims=True)
    expected = [[literal_cka(X, Y, estimator) for Y in centred] for X in centred]
    np.testing.assert_allclose(cka(rounded, estimator), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sink_token(estimator):
    layers = make_layers()
    layers[:, 0] *= 300
    expected = [[literal_cka(X, Y, estimator) for Y in layers] for X in layers]
    np.testing.assert_allclose(cka(layers, estimator), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("place", [0, 16, 31])
def test_debiased_beside_a_token_of_any_length(place):
    """Which token is the sink and how long it is takes no digit from the others: exact is 80-bit arithmetic."""
    layers = make_layers()
    layers[:, place] *= 1e7
    exact = [[literal_cka(X, Y, "debiased") for Y in layers] for X in layers.astype(np.longdouble)]
    np.testing.assert_allclose(cka(layers, "debiased"), np.array(exact, np.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("power", [-160, 160])
def test_no_power_of_the_states_leaves_the_range_of_float64(estimator, power):
    """Grams are squares of states and the table is of their squares; what has been squared once comes as a Gram."""
    layers = make_layers()
    expected = cka(layers, estimator)
    np.testing.assert_allclose(cka(layers * 10.0**power, estimator), expected, rtol=0, atol=1e-9)
    grams = centred_gram(layers * 10.0 ** (power / 2))
    table = gram_table_from_grams(grams, estimator)
    norms = np.sqrt(np.diagonal(table))
    np.testing.assert_allclose(table / np.outer(norms, norms), expected, rtol=0, atol=1e-9)
    as_they_stand = np.tile(np.arange(32), (1, 6, 1))
    np.testing.assert_allclose(shuffled_cka(grams, as_they_stand, estimator)[0], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_extreme_scales_do_not_overflow(dtype):
    layers = make_layers()
    scaled = (layers * 1e30).astype(dtype)
    np.testing.assert_allclose(cka(scaled), cka(layers), atol=1e-6)
    for factor in (1e30, 1e-30):
        in_float32 = jnp.asarray(layers * factor, jnp.float32)
        np.testing.assert_allclose(jax.jit(cka)(in_float32), cka(layers), atol=1e-4)


def test_integers_are_taken_as_numbers():
    layers = np.random.default_rng(0).integers(-5, 6, size=(3, 8, 5))
    np.testing.assert_array_equal(cka(layers), cka(layers.astype(np.float64)))


# Conditional CKA


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_conditional_cka_is_the_cka_of_concatenations(estimator):
    layers = make_layers()
    sets = np.array([[0, 2], [5, 1], [3, 4]])
    M = conditional_cka(layers, sets, estimator)
    assert M.shape == (3, 6, 6)
    assert M.dtype == np.float64
    for chosen, conditional in zip(sets.tolist(), M, strict=True):
        joined = [np.concatenate(layers[sorted({*chosen, i})], axis=1) for i in range(6)]
        expected = [[literal_cka(X, Y, estimator) for Y in joined] for X in joined]
        np.testing.assert_allclose(conditional, expected, rtol=0, atol=1e-9)


def test_conditional_cka_within_the_set_is_exactly_one():
    layers = make_layers()
    M = conditional_cka(layers, np.array([[1, 3, 4]]))[0]
    np.testing.assert_array_equal(M[np.ix_([1, 3, 4], [1, 3, 4])], 1)
    np.testing.assert_array_equal(np.diagonal(M), 1)
    np.testing.assert_array_equal(M, M.T)
    assert (M[0, [2, 5]] < 1).all()


def test_transitions_survive_a_member_that_outweighs_the_rest():
    """A member of L with 1000 times the norm leaves `M` near 1, where float32 sees no step at all."""
    layers = make_layers()
    layers[2] *= 1000
    joined = [np.concatenate(layers[sorted({2, i})], axis=1).astype(np.longdouble) for i in range(6)]
    joined = [(X - X.mean(axis=0)) / np.abs(X).max() for X in joined]
    grams = np.stack([(X @ X.T).ravel() for X in joined])
    norms = np.sqrt((grams * grams).sum(axis=1))
    exact = (grams @ grams.T) / np.outer(norms, norms)
    delta = np.sqrt((np.diff(exact, axis=0) ** 2).sum(axis=1))
    assert (1 - exact).max() < 1e-5
    np.testing.assert_allclose(
        transitions(conditional_cka(layers, np.array([[2]])))[0], delta.astype(float), rtol=0, atol=1e-15
    )


def test_the_table_is_defined_up_to_one_factor():
    layers = make_layers()
    table = gram_table(layers)
    grams = [X @ X.T for X in layers - layers.mean(axis=1, keepdims=True)]
    expected = np.array([[np.sum(K * L) for L in grams] for K in grams])
    np.testing.assert_allclose(table / table[0, 0], expected / expected[0, 0], rtol=1e-12)


def test_a_beam_of_sets_equals_its_sets_one_by_one():
    table = gram_table(make_layers(N=10))
    sets = np.array([np.random.default_rng(i).permutation(10)[:3] for i in range(300)])
    M = conditional_cka_from_table(table, sets)
    for i in (0, 17, 299):
        np.testing.assert_allclose(M[i], conditional_cka_from_table(table, sets[i : i + 1])[0], rtol=0, atol=1e-14)


def test_sets_of_several_tables_equal_each_table_by_itself():
    tables = np.stack([gram_table(make_layers(seed=seed)) for seed in range(3)])
    sets, problems = np.array([[0, 3], [1, 2], [0, 3], [4, 5]]), np.array([2, 0, 1, 2])
    together = conditional_cka_from_table(tables, sets, problems)
    for M, layers, problem in zip(together, sets, problems, strict=True):
        np.testing.assert_array_equal(M, conditional_cka_from_table(tables[problem], layers[None])[0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_table_of_centred_grams_is_that_of_the_states(estimator):
    layers = make_layers()
    layers[2, :, 3] += 1e5  # a massive channel
    layers[4, 0] *= 1e3  # a sink token
    expected, table = gram_table(layers, estimator), gram_table_from_grams(centred_gram(layers), estimator)
    scale = np.sqrt(np.diagonal(expected) / np.diagonal(table))
    np.testing.assert_allclose(scale, scale[0], rtol=1e-7)
    norms = np.sqrt(np.diagonal(expected))
    np.testing.assert_allclose(
        table * scale[0] ** 2 / np.outer(norms, norms), expected / np.outer(norms, norms), atol=1e-7
    )
    with pytest.raises(LayerwaveError, match="layer 1 "):
        gram_table_from_grams(centred_gram(np.where(np.arange(6)[:, None, None] == 1, 7.0, layers)), estimator)


def test_transitions():
    M = np.array([[1, 0, 0], [0.6, 0, 0.8], [0.6, 0, 0]])
    np.testing.assert_allclose(transitions(M), [np.sqrt(0.16 + 0.64), 0.8], rtol=1e-15)
    np.testing.assert_array_equal(transitions(np.stack([M, M[::-1]]))[0], transitions(M))
    delta = transitions(cka(make_layers(N=9)))
    assert delta.argmax() == 3  # the jump is between layers 3 and 4


# Inside a trace


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_traced_equals_plain(estimator):
    layers, sets = make_layers(), np.array([[0, 2], [5, 1]])
    plain = conditional_cka(layers, sets, estimator)
    with jax.enable_x64(True):
        traced = jax.jit(lambda layers, sets: conditional_cka(layers, sets, estimator))(layers, sets)
        assert traced.dtype == jnp.float64
        mapped = jax.vmap(lambda chosen: conditional_cka(layers, chosen[None], estimator)[0])(jnp.asarray(sets))
        steps = jax.jit(jax.vmap(transitions))(traced)
    np.testing.assert_allclose(np.asarray(traced), plain, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.asarray(mapped), plain, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.asarray(steps), transitions(plain), rtol=0, atol=1e-12)
    in_float32 = jax.jit(lambda layers: cka(layers, estimator))(jnp.asarray(layers, jnp.float32))
    np.testing.assert_allclose(in_float32, cka(layers, estimator), atol=1e-4)


def test_constant_layer_gives_nan_inside_a_trace():
    layers = make_layers().astype(np.float32)
    layers[2] = layers[2, :1]
    M = jax.jit(cka)(jnp.asarray(layers))
    assert jnp.isnan(M[2]).all()
    assert jnp.isfinite(jnp.delete(jnp.delete(M, 2, 0), 2, 1)).all()


def test_equal_shapes_compile_once(caplog):
    layers = make_layers()

    def run(layers):
        transitions(conditional_cka(layers, np.array([[0, 1]]), "debiased"))
        cka(layers)

    run(layers)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run(layers + 1)
        assert not [record.message for record in caplog.records if "ompil" in record.message]
        run(layers[:5])
        assert [record.message for record in caplog.records if "ompil" in record.message]


# Faults


@pytest.mark.parametrize("row", [0.1, 1 / 3, 1e5 + 0.1, 0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_constant_layer_is_named(estimator, dtype, row):
    layers = make_layers(B=31).astype(dtype)
    layers[3] = row
    for call in (gram_table, cka, lambda layers, e: conditional_cka(layers, np.array([[0]]), e)):
        with pytest.raises(LayerwaveError, match=f"layer 3 .*{estimator} CKA is undefined"):
            call(layers, estimator)


def test_orthonormal_tokens_have_no_debiased_cka():
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(32, 32)))
    with pytest.raises(LayerwaveError, match=r"layer 0 .*debiased CKA is undefined"):
        cka(rotation[None], "debiased")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_layer_that_is_not_finite_is_named(estimator, bad):
    layers = make_layers()
    layers[4, 7, 9] = bad
    with pytest.raises(LayerwaveError, match="layer 4 holds NaN or infinite states"):
        cka(layers, estimator)


def test_an_estimator_that_there_is_not(unchecked_signatures):
    layers = make_layers()
    for call in (gram_table, cka, lambda layers, estimator: gram_table_from_grams(centred_gram(layers), estimator)):
        with pytest.raises(LayerwaveError, match="estimator='unbiased': expected 'biased' or 'debiased'"):
            call(layers, "unbiased")


def test_debiased_needs_four_tokens():
    layers = make_layers(B=4)
    assert np.isfinite(cka(layers, "debiased")).all()
    with pytest.raises(LayerwaveError, match="on 3 tokens: expected at least 4"):
        cka(layers[:, :3], "debiased")
    with pytest.raises(LayerwaveError, match="on 3 tokens"):
        jax.jit(lambda states: cka(states, "debiased"))(jnp.asarray(layers[:, :3], jnp.float32))
    assert np.isfinite(cka(layers[:, :, :3], "debiased")).all()  # features may be as few as they like
    with pytest.raises(LayerwaveError, match="constant over tokens"):
        cka(layers[:, :1])


def test_faulty_sets_are_named():
    layers = make_layers()
    with pytest.raises(LayerwaveError, match=r"layer 6 in the set \[0, 6\] is out of range: expected 0 to 5"):
        conditional_cka(layers, np.array([[0, 6]]))
    with pytest.raises(LayerwaveError, match=r"layer 1 is repeated in the set \[1, 1\]"):
        conditional_cka(layers, np.array([[1, 1]]))
    with pytest.raises(LayerwaveError, match="size 0"):
        conditional_cka(layers, np.zeros((1, 0), int))
