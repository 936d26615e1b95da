"""The training-time test against a draft that is unrolled slot by slot, and what must not change its result."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layerwave.drafts import DraftConfig, Eagle3, UnrollSettings, supervise, unroll
from layerwave.drafts.checkpoint import draft_parameters
from layerwave.drafts.loader import Batch
from layerwave.errors import LayerwaveError
from layerwave.targets.checkpoint import tensors_of
from layerwave.targets.rope import Rope
from tests.drafts.literal_draft import LiteralDraft, literal_unroll

V, VD, D, U, ROWS, T = 30, 17, 12, 5, 3, 11
CONFIG = DraftConfig(
    layers=(1, 4, 6),
    num_target_layers=8,
    target_hidden_size=D,
    hidden_size=D,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=V,
    draft_vocab_size=VD,
    max_positions=64,
    norm_eps=1e-5,
    rope=Rope(100.0),
)
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYERS = {1: (6,), 2: (1, 6), 3: (1, 4, 6), 5: (0, 1, 4, 6, 7)}
SLOTS = {1: (3,), 2: (0, 4), 3: (0, 2, 3), 5: (0, 1, 2, 3, 4)}


def random_module(config, seed=0):
    """A draft with every parameter random, norms too, so that none of them can stand in for another."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Eagle3(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def value(x):
        scale = 1 if x.ndim == 1 else 1.5 / np.sqrt(x.shape[0])
        return jnp.asarray(scale * rng.normal(1.0 if x.ndim == 1 else 0.0, 0.5, x.shape), jnp.float32)

    return graphdef, jax.tree.map(value, params)


def rows():
    """One whole document; one with padding behind it; three in one row, one of them of two tokens, and padding."""
    rng = np.random.default_rng(5)
    documents = np.array([[1] * T, [2] * 8 + [-1] * 3, [3] * 5 + [4] * 2 + [5] * 3 + [-1]], np.int32)
    positions = np.array([[*range(T)], [*range(8), 0, 0, 0], [*range(5), 0, 1, 0, 1, 2, 0]], np.int32)
    mask = (documents > 0) & (rng.random((ROWS, T)) < 0.9)
    return Batch(rng.integers(0, V, (ROWS, T), dtype=np.int32), mask, positions, documents)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    vocabulary = np.sort(rng.choice(V, VD, replace=False)).astype(np.int32)
    return rows(), draw(U, ROWS, T, D), draw(ROWS, T, D), draw(V, D), draw(V, D), vocabulary


def jitted(graphdef, settings, *, gradient=True):
    """Loss and sums, and the gradient; the target's part computed inside."""

    # At these sizes compiling is what takes time, not running.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params, slots, batch, states, normed, head, embedding, vocabulary):
        supervision = supervise(normed, head, vocabulary, chunk=8)

        def loss(params):
            return unroll(graphdef, params, slots, batch, states, supervision, embedding, vocabulary, settings)

        return jax.value_and_grad(loss, has_aux=True)(params) if gradient else loss(params)

    return run


def slots(m):
    return jnp.asarray(SLOTS[m], jnp.int32)


def literal(config, params, graphdef, settings, data):
    module = nnx.merge(graphdef, params)
    tensors = tensors_of(module, draft_parameters(module), np.float64)
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    options = [name for name in OPTIONS if getattr(config, name)]
    draft = LiteralDraft(tensors, sizes, config.norm_eps, config.rope.theta, options)
    batch, states, *rest = (np.asarray(x, np.float64) if np.asarray(x).dtype == np.float32 else x for x in data)
    read = states[list(SLOTS[len(config.layers)])]
    return literal_unroll(draft, settings.steps, settings.decay, settings.mean, batch, read, *rest)


@pytest.mark.parametrize(
    ("m", "steps", "mean", "options"),
    [
        (3, 1, "masked", ()),
        (3, 2, "masked", ()),
        (3, 3, "masked", ()),
        (3, 4, "all", ()),
        (1, 3, "masked", ("norm_before_residual",)),
        (2, 3, "masked", ("norm_before_fc", "norm_before_residual")),
        (5, 3, "masked", ("fc_norm", "norm_output")),
        (1, 4, "masked", ("norm_output",)),
    ],
)
def test_equals_a_draft_unrolled_slot_by_slot(data, m, steps, mean, options):
    config = replace(CONFIG, layers=LAYERS[m], **dict.fromkeys(options, True))
    graphdef, params = random_module(config, seed=m)
    settings = UnrollSettings(steps=steps, decay=0.7, mean=mean)
    loss, sums = jitted(graphdef, settings, gradient=False)(params, slots(m), *data)
    expected_loss, expected = literal(config, params, graphdef, settings, data)
    assert expected["trained"][-1] >= 3
    assert 0 < expected["trained"][0] < expected["asked"][0]
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(sums, name), value, rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(sums.losses, expected["loss"] / expected["trained"], rtol=2e-5)
    np.testing.assert_allclose(sums.accuracy, expected["correct"] / expected["asked"], rtol=2e-5)
    np.testing.assert_allclose(sums.acceptance, expected["overlap"] / expected["asked"], rtol=2e-5)
    np.testing.assert_allclose(sums.tau_greedy, 1 + expected["accepted_greedy"] / expected["complete"], rtol=2e-5)
    np.testing.assert_allclose(sums.tau_sampled, 1 + expected["accepted_sampled"] / expected["complete"], rtol=2e-5)


@pytest.fixture(scope="module")
def three(data):
    """A draft of three layers, three steps, and its loss, sums and gradient on the data."""
    graphdef, params = random_module(CONFIG)
    run = jitted(graphdef, UnrollSettings(steps=3))
    return graphdef, params, run, run(params, slots(3), *data)


def test_gradient_is_that_of_the_unrolled_draft(data, three):
    """Along random directions, by central differences of the literal loss: the feedback carries gradients too."""
    graphdef, params, _, (_, grads) = three
    settings, rng, step = UnrollSettings(steps=3), np.random.default_rng(9), 1e-4
    for _ in range(2):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

        def at(distance, direction=direction):
            moved = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + distance * d, params, direction)
            return literal(CONFIG, moved, graphdef, settings, data)[0]

        along = sum(float(np.vdot(g, v)) for g, v in zip(*map(jax.tree.leaves, (grads, direction)), strict=True))
        assert along == pytest.approx((at(step) - at(-step)) / (2 * step), rel=1e-3)


def test_what_stands_in_padding_changes_nothing(data, three):
    _, params, run, (found, grads) = three
    batch, states, normed, *rest = data
    padding = batch.documents < 0
    tokens = np.where(padding, (batch.tokens + 7) % V, batch.tokens)
    positions = np.where(padding, 40, batch.positions)
    states = np.where(padding[None, ..., None], 1e4, states).astype(np.float32)
    normed = np.where(padding[..., None], -50, normed).astype(np.float32)
    other = run(params, slots(3), Batch(tokens, batch.loss_mask, positions, batch.documents), states, normed, *rest)
    jax.tree.map(np.testing.assert_array_equal, other, (found, grads))


def test_packed_documents_do_not_meet(data, three):
    """The documents of the packed row, each in a row of its own, give the same sums and gradient."""
    _, params, run, _ = three
    batch, states, normed, *rest = data
    apart = [(2, 0, 5), (2, 5, 7), (2, 7, 10)]

    def moved(x, empty, axis):
        rows = []
        for row, first, last in apart:
            piece = x[:, row, first:last] if axis else x[row, first:last]
            widths = [(0, 0)] * piece.ndim
            widths[axis] = (0, T - (last - first))
            rows.append(np.pad(piece, widths, constant_values=empty))
        return np.stack(rows, axis)

    def alone(x, axis=0):
        """The packed row, and two rows of padding."""
        return np.stack([x[:, 2] if axis else x[2], *(x[:, 1] if axis else x[1],) * 2], axis)

    packed = Batch(*(alone(x) for x in batch))
    packed.loss_mask[1:], packed.documents[1:] = False, -1
    unpacked = Batch(*(moved(x, empty, 0) for x, empty in zip(batch, (0, False, 0, -1), strict=True)))
    first = run(params, slots(3), packed, alone(states, 1), alone(normed), *rest)
    second = run(params, slots(3), unpacked, moved(states, 0, 1), moved(normed, 0, 0), *rest)
    assert float(first[0][1].asked[0]) > 2
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), first, second)


def test_a_masked_row_is_a_row_that_is_not_there(data, three):
    _, params, run, _ = three
    batch, states, normed, *rest = data
    mask = batch.loss_mask.copy()
    mask[0] = False
    masked = run(params, slots(3), batch._replace(loss_mask=mask), states, normed, *rest)
    dropped = run(params, slots(3), Batch(*(x[1:] for x in batch)), states[:, 1:], normed[1:], *rest)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), masked, dropped)


def test_nothing_to_learn_gives_zero_and_no_gradient(data, three):
    _, params, run, _ = three
    batch, *rest = data
    (loss, sums), grads = run(params, slots(3), batch._replace(loss_mask=np.zeros_like(batch.loss_mask)), *rest)
    assert loss == 0
    assert sums.tau_greedy == 1
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


def test_many_drafts_at_once_are_as_each_alone(data, three):
    _, params, run, alone = three
    other, places = random_module(CONFIG, seed=4)[1], np.array([SLOTS[3], (1, 3, 4)], np.int32)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), params, other)
    both = jax.vmap(run, in_axes=(0, 0, *[None] * 6))(stacked, places, *data)
    second = run(other, jnp.asarray(places[1]), *data)
    for i, expected in enumerate((alone, second)):
        found = jax.tree.map(lambda x, i=i: x[i], both)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def test_rematerialised_steps_change_nothing(data, three):
    graphdef, params, _, expected = three
    found = jitted(graphdef, UnrollSettings(steps=3, remat=False))(params, slots(3), *data)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def test_bfloat16_computes_near_float32_and_gradients_stay_float32(data, three):
    graphdef, params, _, ((loss, _), grads) = three
    run = jitted(graphdef, UnrollSettings(steps=3, dtype="bfloat16"))
    (low_loss, low_sums), low_grads = run(params, slots(3), *data)
    assert {x.dtype for x in jax.tree.leaves((low_loss, low_sums, low_grads))} == {jnp.dtype("float32")}
    assert loss != low_loss
    np.testing.assert_allclose(low_loss, loss, rtol=0.02)
    first, second = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(x)]) for x in (grads, low_grads))
    assert first @ second > 0.99 * np.linalg.norm(first) * np.linalg.norm(second)


def test_supervision_is_the_softmax_in_float64(data):
    _, _, normed, head, _, vocabulary = data
    found = supervise(jnp.asarray(normed), jnp.asarray(head), jnp.asarray(vocabulary), chunk=7)
    logits = normed.astype(np.float64) @ head.T.astype(np.float64)
    full = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    covered = full[..., vocabulary].sum(-1)
    np.testing.assert_allclose(found.probabilities, full[..., vocabulary] / covered[..., None], rtol=1e-5)
    np.testing.assert_allclose(found.covered, covered, rtol=1e-5)
    np.testing.assert_array_equal(found.best, logits.argmax(-1))


@pytest.mark.parametrize("values", [{"steps": 0}, {"decay": 0.0}, {"decay": 1.5}])
def test_settings_out_of_range(values):
    with pytest.raises(LayerwaveError, match="expected at least 1 step and a decay"):
        UnrollSettings(**values)
