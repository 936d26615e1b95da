"""The streamed pass against the literal pipeline, and against itself under other batches, padding and order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_target
from flax import nnx
from literal_calibration import assert_equal, next_token_entropy

from layerwave.calibration import Calibration, calibrate, read_conversations
from layerwave.calibration.step import Sums, batch_step
from layerwave.calibration.tokens import encode, fingerprint
from layerwave.errors import LayerwaveError

WORDS = (
    "the wave of states over depth is a quiz in lazy prose with zest; what holds at one layer may fail 12 later".split()
)


def texts(number, lengths=(140, 199, 255), seed=0):
    """Random words, of few different lengths: each costs the literal pipeline a compilation."""
    rng = np.random.default_rng(seed)
    return [{"text": " ".join(rng.choice(WORDS, 80))[: rng.choice(lengths)]} for _ in range(number)]


ROWS = [
    *texts(9),
    {"messages": [{"role": "user", "content": "Zebras?"}, {"role": "assistant", "content": "zz " * 30}]},
]
SETTINGS = {"block": 16, "rho": 0.4, "sink_multiple": 3.0, "max_length": 256}


@pytest.fixture(scope="module")
def calibration(target):
    return calibrate(target, ROWS, **SETTINGS)


def assert_equal_to_rounding(ours, theirs):
    np.testing.assert_array_equal(ours.counts, theirs.counts)
    scale = np.abs(theirs.sums).max(axis=(0, 2, 3))
    for layer in range(theirs.num_layers):
        np.testing.assert_allclose(ours.sums[:, layer], theirs.sums[:, layer], rtol=0, atol=1e-5 * scale[layer])
    np.testing.assert_array_equal(ours.fingerprints, theirs.fingerprints)
    np.testing.assert_array_equal(ours.kept, theirs.kept)
    np.testing.assert_array_equal(ours.sinks, theirs.sinks)
    np.testing.assert_allclose(ours.curves, theirs.curves, atol=1e-4)


@pytest.fixture(scope="module")
def unpadded(target):
    """Fingerprint, states of all layers, and final-normed last states of every row, run one at a time."""
    forward = jax.jit(lambda tokens: target.decoder(tokens)[:2])
    samples = []
    for conversation in read_conversations(ROWS):
        ids = np.array(encode(target.tokenizer, conversation)[:256], np.int32)
        states, normed = forward(ids[None])
        samples.append((fingerprint(ids), np.array(states[:, 0]), np.array(normed[0])))
    return samples


@pytest.mark.parametrize("changes", [{}, {"rho": 1.0}, {"rho": 0.2, "sinks": "drop", "final_state": "post_norm"}])
def test_all_four_pools_are_those_of_the_literal_pipeline(target, unpadded, changes):
    calibration = calibrate(target, ROWS, **SETTINGS | changes)
    post_norm = calibration.settings.final_state == "post_norm"
    samples = [
        ([*states[:-1], normed] if post_norm else states, next_token_entropy(normed, target.decoder.head_weight()))
        for _, states, normed in unpadded
    ]
    assert_equal(calibration, [identity for identity, _, _ in unpadded], samples, tolerance=1e-5)
    assert calibration.sinks.sum() > 20
    pools = [calibration.pool(filtered=f, sinks=s) for f in (True, False) for s in ("keep", "drop")]
    assert not np.allclose(pools[0], pools[1])
    assert np.allclose(pools[0], pools[2]) == (calibration.settings.rho == 1)


@pytest.mark.parametrize("batch_tokens", [256, 100_000])
def test_batches_do_not_change_the_result(target, calibration, batch_tokens):
    assert_equal_to_rounding(calibrate(target, ROWS, **SETTINGS, batch_tokens=batch_tokens), calibration)


def test_more_padding_does_not_change_the_result(target):
    # The greatest bucket is max_length: samples of 141 to 200 tokens are padded to 200 or to 256.
    rows = texts(5, (140, 199), seed=2)
    tight, padded = (calibrate(target, rows, **SETTINGS | {"max_length": width}) for width in (200, 256))
    assert tight.lengths.max() > 128
    assert_equal_to_rounding(padded, tight)


def test_the_order_of_rows_does_not_change_the_result(target, calibration):
    assert_equal_to_rounding(calibrate(target, ROWS[::-1], **SETTINGS), calibration)


def test_batch_mates_do_not_matter(target, calibration):
    alone = calibrate(target, ROWS[:1], **SETTINGS)
    place = int(np.flatnonzero(calibration.fingerprints == alone.fingerprints[0])[0])
    np.testing.assert_allclose(calibration.curves[:, place], alone.curves[:, 0], atol=1e-5)
    np.testing.assert_array_equal(calibration.kept[:, place], alone.kept[:, 0])


def test_halves_merged_are_the_whole(target, calibration):
    halves = [calibrate(target, ROWS[start::2], **SETTINGS) for start in (0, 1)]
    assert_equal_to_rounding(Calibration.merge(halves), calibration)
    with pytest.raises(LayerwaveError, match=r"5 of 10 samples stand in two"):
        Calibration.merge([halves[0], halves[0]])


def test_one_compilation_for_each_length_bucket(target):
    rows = texts(30, range(20, 256), seed=1)
    batch_step.clear_cache()
    calibration = calibrate(target, rows, block=8, batch_tokens=1024)
    assert batch_step._cache_size() == calibration.tallies["compilations"] == 3  # 64, 128, 256
    calibrate(target, rows, block=8, batch_tokens=1024, seed=1, sinks="drop")
    assert batch_step._cache_size() == calibration.tallies["compilations"]


def test_logits_of_all_positions_never_exist_at_once():
    target = make_target(vocab_size=40_000, layers=2)
    graphdef, params = nnx.split(target.decoder)
    T = 1024
    compiled = batch_step.lower(
        graphdef,
        params,
        Sums(jnp.zeros((2, 4, 32, 48)), jnp.zeros((2, 35, 32, 48))),
        jnp.zeros((1, T), jnp.int32),
        jnp.full(1, T, jnp.int32),
        jnp.ones((35, 1)),
        0,
        jnp.zeros((2, 128), jnp.int32),
        None,
        rho=0.3,
        post_norm=False,
        sink_multiple=10.0,
        dtype=jnp.float32,
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.6 * T * 40_000 * 4


def test_the_step_lowers_for_accelerators(target):
    graphdef, params = nnx.split(target.decoder)
    step = partial(batch_step, graphdef, rho=0.3, post_norm=False, sink_multiple=10.0, dtype=jnp.bfloat16)
    sums = Sums(jnp.zeros((4, 4, 32, 48)), jnp.zeros((4, 35, 32, 48)))
    arguments = params, sums, jnp.zeros((2, 64), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((35, 2)), 0
    arguments = *arguments, jnp.zeros((2, 8), jnp.int32), jnp.zeros((48, 16))
    for platform in ("cuda", "tpu"):
        exported = jax.export.export(jax.jit(step), platforms=[platform])(*arguments)
        assert "callback" not in exported.mlir_module()  # nothing leaves the device within a batch


def test_bfloat16_targets_are_summed_in_float32(target):
    with jax.numpy_dtype_promotion("standard"):  # jax.nn.dot_product_attention promotes by itself
        half = calibrate(make_target("bfloat16"), ROWS[:5], **SETTINGS)
    whole = calibrate(target, ROWS[:5], **SETTINGS)
    assert (half.sums.dtype, half.target_dtype, whole.target_dtype) == (np.float32, "bfloat16", "float32")
    assert half.tokens.states.dtype == half.tokens.head.dtype == np.float32
    assert (half.tokens.states == half.tokens.states.astype(jnp.bfloat16)).all()
    pools = half.pool(filtered=False), whole.pool(filtered=False)
    np.testing.assert_allclose(*pools, rtol=0, atol=0.05 * np.abs(pools[1]).max())


def test_progress_counts_samples_and_tokens(target, calibration):
    calls = []
    calibrate(target, ROWS, **SETTINGS, batch_tokens=256, progress=lambda *call: calls.append(call))
    done, total, tokens = zip(*calls, strict=True)
    assert set(total) == {10}
    assert len(calls) > 3
    assert sorted(done) == list(done)
    assert (done[-1], tokens[-1]) == (10, calibration.lengths.sum())


def test_max_length_is_lowered_to_the_targets_positions_and_recorded(target):
    calibration = calibrate(target, [{"text": "abc " * 200}])
    assert (calibration.settings.max_length, calibration.lengths.tolist()) == (512, [512])
    assert calibration.tallies["samples cut to max_length"] == 1


def planted(value, layer):
    """A target whose layer adds `value` to the residual stream."""
    target = make_target()
    kernel = target.decoder.layers.mlp.down_proj.kernel
    kernel[...] = kernel[...].at[layer].set(value)
    return target


def test_states_that_are_not_finite_name_the_first_such_layer():
    with pytest.raises(LayerwaveError, match=r"layer 2 hold NaN or infinity"):
        calibrate(planted(float("nan"), 2), ROWS, **SETTINGS)


def test_states_that_are_all_zero_name_the_layer():
    target = make_target()
    target.decoder.embed_tokens.embedding[...] *= 0
    with pytest.raises(LayerwaveError, match=r"layer 0 are all zero"):
        calibrate(target, ROWS, **SETTINGS)


def test_samples_that_keep_less_than_a_block():
    target = make_target()
    with pytest.raises(
        LayerwaveError, match=r"kept a block of 32 tokens: of 61 tokens of the longest of 2, rho=0.3 .* at most 19"
    ):
        calibrate(target, [{"text": "a" * 60}, {"text": "b" * 50}])
    with pytest.raises(LayerwaveError, match=r"every sample is shorter than a block"):
        calibrate(target, [{"text": "a" * 30}])


def test_a_sample_without_a_block_has_no_curve(target):
    calibration = calibrate(target, [ROWS[0], {"text": "b c" * 11}], **SETTINGS)
    short = int(np.argmin(calibration.lengths))
    assert np.isnan(calibration.sample_curves()[short]).all()
    assert np.isfinite(calibration.sample_curves(filtered=False)).all()
    assert calibration.summary["samples without a block"] == 1


def test_unknown_settings_are_named(target):
    with pytest.raises(LayerwaveError, match=r"unknown setting 'roh', expected one of rho, block"):
        calibrate(target, ROWS, roh=0.3)


def test_nothing_is_left_on_the_device(target):
    calibrate(target, ROWS, **SETTINGS)
    before = len(jax.live_arrays())
    calibrate(target, ROWS, **SETTINGS)
    assert len(jax.live_arrays()) <= before
