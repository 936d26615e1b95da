"""Token Grams and the acceptance of the best linear draft, beside float64, batches and plain numpy."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.errors import LayerwaveError
from layerwave.kernels import set_acceptance, token_grams
from layerwave.kernels.ridge import RidgeProblem, _climb, _solve

N, D, R = 5, 24, 20
FIT, CHOOSE, SCORE = 96, 32, 30
SAMPLES = np.arange(SCORE) % 4
PAIRS = np.array(list(combinations(range(N), 2)), np.int32)


def softmax(logits):
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def arrays():
    """A linear truth with noise: Grams of mean diagonal 1, targets, head and distributions in float64."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N + 1, FIT + SCORE, D))
    # Every set knows something, the embedding: a draft that knows nothing would have no best λ.
    known = sum(X[source] @ rng.normal(size=(D, D)) / 2 for source in (1, 3, N))
    Y = known + 5 * rng.normal(size=(FIT + SCORE, D))
    head = rng.normal(size=(R, D)) / 10
    mean = Y[:FIT].mean(axis=0)
    p = softmax(Y @ head.T)
    grams = X @ np.swapaxes(X[:, :FIT], 1, 2)
    grams /= np.trace(grams[:, :FIT], axis1=1, axis2=2)[:, None, None] / FIT
    return {
        "grams": grams[:N],
        "embedding": grams[N],
        "targets": Y[:FIT] - mean,
        "head": head,
        "offset": head @ mean,
        "inner": p[FIT - CHOOSE : FIT],
        "scored": p[FIT:],
        "top": p[FIT:].argmax(axis=1).astype(np.int32),
        "samples": SAMPLES.astype(np.int32),
        "counts": np.bincount(SAMPLES).astype(np.float64),
    }


def problem(arrays, dtype=np.float32):
    return RidgeProblem(
        **{name: jnp.asarray(array, dtype if array.dtype == np.float64 else None) for name, array in arrays.items()}
    )


@pytest.fixture(scope="module")
def found(arrays):
    return set_acceptance(problem(arrays), np.ones(N, np.float32), PAIRS)


def test_token_grams_are_products_with_the_fitting_rows():
    X = np.random.default_rng(1).normal(size=(3, 9, 4)).astype(np.float32) * np.float32([1, 10, 1e-6])[:, None, None]
    grams, scales = token_grams(X, 6)
    for layer, products, scale in zip(X.astype(np.float64), grams, scales, strict=True):
        expected = layer @ layer[:6].T
        np.testing.assert_allclose(scale, np.trace(expected[:6]) / 6, rtol=1e-5)
        np.testing.assert_allclose(products, expected / scale, rtol=1e-4, atol=1e-5)
        assert np.trace(products[:6]) == pytest.approx(6, rel=1e-5)


def test_token_grams_show_layers_that_have_none():
    X = np.ones((3, 4, 2), np.float32)
    X[1] = 0
    X[2, 0, 0] = np.inf
    _, scales = token_grams(X, 3)
    assert scales.tolist() == [2, 0, np.inf]


def test_the_fit_is_that_of_numpy(arrays, found):
    for row, (a, b) in enumerate(PAIRS):
        K = (arrays["grams"][a] + arrays["grams"][b]) / 2 + arrays["embedding"]
        ridge = float(found.ridge[row])
        predicted = K[FIT:] @ np.linalg.solve(K[:FIT] + ridge * np.eye(FIT), arrays["targets"])
        logits = predicted @ arrays["head"].T + arrays["offset"]
        overlap = np.minimum(arrays["scored"], softmax(logits)).sum(axis=1)
        np.testing.assert_allclose(found.by_sample[row], np.bincount(SAMPLES, overlap), atol=1e-4)
        assert int(found.hits[row]) == np.sum(logits.argmax(axis=1) == arrays["scored"].argmax(axis=1))
        assert found.residual[row] < 1e-4
    assert tuple(PAIRS[np.argmax(found.by_sample.sum(axis=1))]) == (1, 3)


def test_a_ridge_at_which_the_solve_is_not_exact_is_not_taken(arrays):
    """Without noise in what small directions tell the least λ would be best, but float32 ends long before."""
    decay = 0.65 ** np.arange(D)
    X = np.random.default_rng(5).normal(size=(2, FIT + SCORE, D))
    products = (X * decay) @ np.swapaxes((X * decay)[:, :FIT], 1, 2)
    products /= np.trace(products[:, :FIT], axis1=1, axis2=2)[:, None, None] / FIT
    Y = X[0] @ np.random.default_rng(6).normal(size=(D, D))
    mean, p = Y[:FIT].mean(axis=0), softmax(Y @ arrays["head"].T)
    known = {"grams": products[:1], "embedding": products[1], "targets": Y[:FIT] - mean}
    known |= {"offset": arrays["head"] @ mean, "inner": p[FIT - CHOOSE : FIT], "scored": p[FIT:]}
    found = set_acceptance(problem({**arrays, **known}), np.ones(1, np.float32), np.array([[0]], np.int32))
    # At 1e-3 the fit on three quarters has a residual of 4e-4, at 1e-4 of 3e-3: more than the 2e-3 that are allowed.
    assert found.ridge[0] == pytest.approx(1e-3)
    assert found.at_edge[0]
    assert found.residual[0] < 2e-3


def test_weights_are_shares(arrays):
    weights = np.array([4, 1, 1, 2, 1], np.float32)
    heavy = set_acceptance(problem(arrays), weights, np.array([[0, 3]], np.int32))
    K = (2 * arrays["grams"][0] + arrays["grams"][3]) / 3 + arrays["embedding"]
    one = {**arrays, "grams": (K - arrays["embedding"])[None]}
    alone = set_acceptance(problem(one), weights[:1], np.array([[0]], np.int32))
    np.testing.assert_allclose(heavy.by_sample, alone.by_sample, atol=1e-4)
    scaled = set_acceptance(problem(arrays), 3 * weights, np.array([[3, 0]], np.int32))
    np.testing.assert_allclose(scaled.by_sample, heavy.by_sample, atol=1e-4)


def test_float32_and_float64_agree(arrays, found):
    with jax.enable_x64(True):
        exact = jax.device_get(set_acceptance(problem(arrays, np.float64), np.ones(N), PAIRS))
    assert exact.by_sample.dtype == np.float64
    np.testing.assert_allclose(found.by_sample.sum(axis=1), exact.by_sample.sum(axis=1), atol=5e-5 * SCORE)
    np.testing.assert_allclose(found.ridge, exact.ridge, rtol=1e-2)
    np.testing.assert_array_equal(found.hits, exact.hits)
    assert exact.residual.max() < 1e-12


@pytest.mark.parametrize("batch", [4, 16])
def test_batches_are_the_sets_one_by_one(arrays, found, batch):
    batched = set_acceptance(problem(arrays), np.ones(N, np.float32), PAIRS, batch=batch)
    for together, single in zip(batched, found, strict=True):
        np.testing.assert_allclose(together, single, rtol=1e-3, atol=1e-5)


def test_memory_does_not_grow_with_the_number_of_sets(arrays):
    def temporary(count):
        sets = jax.ShapeDtypeStruct((count, 2), np.int32)
        compute = jax.jit(lambda weights, sets: set_acceptance(problem(arrays), weights, sets, batch=4))
        return (
            compute.lower(jax.ShapeDtypeStruct((N,), np.float32), sets).compile().memory_analysis().temp_size_in_bytes
        )

    assert temporary(4096) - temporary(256) < 4096 * 100  # results, and not the 48 kB of a set's Gram


def relative_residual(K, ridge, A, Y):
    """Of the first 16 columns, in float64."""
    A = np.asarray(A, np.float64)
    return np.linalg.norm((K @ A + ridge * A - Y)[:, :16]) / np.linalg.norm(Y[:, :16])


@pytest.mark.parametrize("rows", [96, 256])  # the second is padded
def test_the_solve_is_that_of_numpy_and_its_residual_too(rows):
    rng = np.random.default_rng(2)
    X, Y = rng.normal(size=(rows, rows // 2)), rng.normal(size=(rows, 20))
    K = X @ X.T / rows
    A, residual = jax.jit(_solve)(*(jnp.asarray(array, jnp.float32) for array in (K, 0.1, Y)))
    np.testing.assert_allclose(A, np.linalg.solve(K + 0.1 * np.eye(rows), Y), atol=1e-3)
    assert relative_residual(K, 0.1, A, Y) < 1e-5
    assert residual < 1e-5
    # At a λ that float32 hardly sees beside K the residual tells how wrong A is, as far as float32 can tell.
    A, residual = jax.jit(_solve)(*(jnp.asarray(array, jnp.float32) for array in (1e3 * K, 1e-3, Y)))
    assert 1e-2 < residual < 1
    assert 1 / 2 < residual / relative_residual(1e3 * K, 1e-3, A, Y) < 2


def climbed(curve):
    """λ, whether it is at an edge, and how many of the grid were evaluated; `curve` takes log10 λ."""
    seen = []

    def value(ridge):
        jax.debug.callback(lambda r: seen.append(float(r)), ridge)
        return jnp.asarray(curve(jnp.log10(ridge)), jnp.float32)

    ridge, at_edge = jax.jit(lambda: _climb(value, np.dtype(np.float32)))()
    jax.effects_barrier()
    return np.log10(float(ridge)), bool(at_edge), len(seen)


@pytest.mark.parametrize(("peak", "tried"), [(-1.2, 3), (0.3, 3), (-3.7, 6), (2, 5)])
def test_the_climb_finds_the_peak_of_a_parabola(peak, tried):
    # Each decade costs 3e-4, which moves the vertex by 3e-4 / 2c. Tried are 0.1 and all on to the peak's far neighbour.
    exponent, at_edge, count = climbed(lambda x: 0.3 - 0.02 * (x - peak) ** 2)
    assert exponent == pytest.approx(peak + 3e-4 / 0.04, abs=1e-3)
    assert (at_edge, count) == (False, tried)


def test_the_climb_stops_at_edges_and_says_so():
    assert climbed(lambda x: -0.01 * x)[:2] == (pytest.approx(-5), True)
    assert climbed(lambda x: 0.01 * x)[:2] == (pytest.approx(3), True)
    # Below 0.01 float32 does not suffice.
    assert climbed(lambda x: jnp.where(x < -2.5, -jnp.inf, -0.01 * x))[:2] == (pytest.approx(-2, abs=1e-6), True)


def test_on_a_plateau_the_climb_takes_the_greater_ridge():
    exponent, at_edge, _ = climbed(lambda x: 0.3 - 0.02 * jnp.maximum(x, 0) ** 2 - 1e-5 * x)
    assert exponent > -1
    assert not at_edge


def test_the_climb_ends_where_nothing_can_be_fitted():
    assert climbed(lambda x: -jnp.inf * x**2)[1:] == (True, 3)


def test_what_is_no_number_is_told(arrays):
    broken = problem({**arrays, "grams": np.full_like(arrays["grams"], np.nan)})
    assert np.isnan(set_acceptance(broken, np.ones(N, np.float32), PAIRS[:1]).residual).all()


def test_refused_sets(arrays):
    weights = np.ones(N, np.float32)
    with pytest.raises(LayerwaveError, match="layer 5 in the set"):
        set_acceptance(problem(arrays), weights, np.array([[1, 5]]))
    with pytest.raises(LayerwaveError, match="layer 1 is repeated"):
        set_acceptance(problem(arrays), weights, np.array([[1, 1]]))
    with pytest.raises(LayerwaveError, match="batch=0"):
        set_acceptance(problem(arrays), weights, PAIRS, batch=0)
