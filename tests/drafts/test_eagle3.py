"""The draft module: its parts, its first parameters, and what its config refuses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layerwave.drafts import DraftConfig, DraftVocabulary, Eagle3, initial_draft, require_target
from layerwave.drafts.checkpoint import draft_parameters
from layerwave.errors import LayerwaveError
from layerwave.targets import KVCache, load_target
from layerwave.targets.checkpoint import tensors_of
from layerwave.targets.decoder import Keys, masked_attention
from tests.drafts.literal_draft import LiteralDraft
from tests.drafts.test_unroll import CONFIG, LAYERS, OPTIONS, VD, D, random_module


@pytest.fixture(scope="module")
def mini():
    return load_target("mini")


@pytest.fixture(scope="module")
def vocabulary(mini):
    counts = np.random.default_rng(0).integers(0, 9, mini.config.vocab_size)
    return DraftVocabulary.from_counts(counts, 100)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def parameters_equal(first, second):
    """Of each parameter, by its path, whether it is the same in both."""
    second = dict(nnx.to_flat_state(nnx.state(second)))
    return {
        ".".join(map(str, path)): value.shape == second[path].shape and np.array_equal(value[...], second[path][...])
        for path, value in nnx.to_flat_state(nnx.state(first))
    }


@pytest.mark.parametrize(("m", "options"), [(1, ()), (2, OPTIONS[1:2]), (3, OPTIONS[:1]), (5, OPTIONS[2:])])
def test_logits_over_whole_sequences_equal_the_literal_draft(m, options):
    config = replace(CONFIG, layers=LAYERS[m], **dict.fromkeys(options, True))
    module = nnx.merge(*random_module(config, seed=m))
    states, embedded = draw(m, 1, 6, D), draw(1, 6, D, seed=1)
    sizes = config.num_heads, config.num_kv_heads, config.head_dim
    tensors = tensors_of(module, draft_parameters(module), np.float64)
    draft = LiteralDraft(tensors, sizes, config.norm_eps, config.rope.theta, options)
    found = nnx.jit(lambda module: module(embedded, states))(module)
    assert found.dtype == jnp.float32
    e, h = np.asarray(embedded, np.float64)[0], np.asarray(states, np.float64)[:, 0]
    seen = [draft.key_value(e[t], draft.features(h[:, t]), t) for t in range(6)]
    for t in range(6):
        expected = draft.logits(draft.step(e[t], draft.features(h[:, t]), t, seen[: t + 1]))
        np.testing.assert_allclose(found[0, t], expected, rtol=1e-4, atol=1e-5)


def test_fc_is_applied_when_one_layer_has_the_draft_width():
    """Some engines leave fc out when the widths match."""
    config = replace(CONFIG, layers=(3,))
    module = nnx.merge(*random_module(config))
    states = draw(1, 2, 4, D)
    module.fc.kernel[...] = 2 * jnp.eye(D)
    np.testing.assert_allclose(module.fuse(states), 2 * states[0], rtol=1e-6)


def test_fc_reads_the_layers_in_the_order_given():
    module = nnx.merge(*random_module(CONFIG))
    states = draw(3, 2, 4, D)
    for i in range(3):
        module.fc.kernel[...] = jnp.zeros((3 * D, D)).at[i * D : (i + 1) * D].set(jnp.eye(D))
        np.testing.assert_allclose(module.fuse(states), states[i], rtol=1e-6)


def test_feedback_is_the_output_before_the_norm_or_after():
    out = draw(1, 4, D)
    for option in (False, True):
        module = nnx.merge(*random_module(replace(CONFIG, norm_output=option)))
        np.testing.assert_array_equal(module.feedback(out), module.norm(out) if option else out)


def test_a_cache_gives_what_one_pass_gives():
    """The block leaves keys, values and mask to its caller: four slots at once, then one at a time."""
    module = nnx.merge(*random_module(CONFIG))
    embedded, features, length = draw(2, 6, D), draw(2, 6, D, seed=1), 6
    order = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (2, length))
    causal = order[:, None, :] <= order[:, :, None]
    block = nnx.jit(
        lambda module, span, positions, mask, *before: module.block(*span, positions, masked_attention(mask, *before))
    )
    whole, _ = block(module, (embedded, features), order, causal)
    cache, found = KVCache.empty(CONFIG.layer_config(), 2, length, jnp.float32), []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        span = embedded[:, first:last], features[:, first:last]
        before = Keys(cache.keys[0], cache.values[0], cache.filled)
        out, (keys, values) = block(module, span, order[:, first:last], causal[:, first:last, first:last], before)
        cache = cache.extended(keys[None], values[None], jnp.full(2, last - first, jnp.int32))
        found.append(out)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, rtol=1e-5, atol=1e-6)


def test_a_module_computes_in_the_dtype_of_its_parameters():
    module = nnx.eval_shape(lambda: Eagle3(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(module))} == {jnp.dtype("bfloat16")}
    states, embedded = draw(3, 1, 4, D), draw(1, 4, D)
    features = nnx.eval_shape(lambda module: module.fuse(states), module)
    logits = nnx.eval_shape(lambda module: module(embedded, states), module)
    assert (features.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


def test_drafts_of_one_width_share_their_graph():
    one, other = (random_module(replace(CONFIG, layers=x))[0] for x in ((1, 2, 3), (0, 4, 7)))
    assert one == other
    assert hash(one) == hash(other)


def test_first_parameters(mini, vocabulary):
    draft = initial_draft(mini, (8, 1, 5), vocabulary, jax.random.key(3))
    assert draft.config.layers == (1, 5, 8)
    assert draft.config == DraftConfig.from_target(mini.config, (1, 5, 8), 100)
    head = np.asarray(mini.decoder.head_weight())
    np.testing.assert_array_equal(draft.module.lm_head.embedding[...], head[vocabulary.tokens])
    for linear in (draft.module.fc, draft.module.midlayer.self_attn.q_proj, draft.module.midlayer.mlp.down_proj):
        kernel = np.asarray(linear.kernel[...])
        # Standard error of the estimate: 1 / sqrt(2 n), here below 1 %.
        assert kernel.std() == pytest.approx(kernel.shape[0] ** -0.5, rel=0.04)


def test_the_key_alone_decides_the_first_parameters(mini, vocabulary):
    make = lambda layers, seed: initial_draft(mini, layers, vocabulary, jax.random.key(seed)).module  # noqa: E731
    first = make((1, 5, 8), 3)
    assert all(parameters_equal(first, make((0, 2, 9), 3)).values())
    assert [name for name, equal in parameters_equal(first, make((6,), 3)).items() if not equal] == ["fc.kernel"]
    assert not parameters_equal(first, make((1, 5, 8), 4))["midlayer.mlp.up_proj.kernel"]


def test_a_draft_belongs_to_its_target(mini, vocabulary):
    draft = initial_draft(mini, (2,), vocabulary, jax.random.key(0))
    require_target(draft, mini)
    with pytest.raises(LayerwaveError, match=r"made for the target 'mini' \(fingerprint .*got 'other' \(0000"):
        require_target(draft, replace(mini, name="other", fingerprint="0" * 64))
    with pytest.raises(LayerwaveError, match="they belong to different drafts"):
        replace(draft, vocabulary=DraftVocabulary(np.arange(99), mini.config.vocab_size))


def test_what_a_draft_of_this_target_cannot_be(mini, vocabulary):
    key = jax.random.key(0)
    with pytest.raises(LayerwaveError, match="layer 12 is out of range"):
        initial_draft(mini, (2, 12), vocabulary, key)
    with pytest.raises(LayerwaveError, match="leave hidden_size out"):
        initial_draft(mini, (2,), vocabulary, key, hidden_size=64)
    with pytest.raises(LayerwaveError, match="a head over 4096 tokens for a draft vocabulary over 10"):
        initial_draft(mini, (2,), DraftVocabulary(np.arange(9), 10), key)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "layer set is empty"),
        ({"layers": (1, 8)}, "layer 8 is out of range"),
        ({"layers": (1, 1)}, "layer 1 is repeated"),
        ({"num_kv_heads": 3}, "4 query heads and 3 key heads"),
        ({"draft_vocab_size": 31}, "has 31 tokens, the target's only 30"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"fc_norm": True, "norm_before_fc": True}, "norm the same input: choose one"),
    ],
)
def test_config_faults(changes, message):
    with pytest.raises(LayerwaveError, match=message):
        replace(CONFIG, **changes)


def test_layers_are_kept_ascending():
    assert replace(CONFIG, layers=(6, 1, 4)) == CONFIG
    assert CONFIG.draft_vocab_size == VD
