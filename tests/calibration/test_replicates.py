"""Bootstrap replicates of a calibration: their weights, and sums that do not depend on how the pass was cut."""

import math
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from layerwave.calibration import Calibration, calibrate
from layerwave.calibration.replicates import SHARES, Replicates, sample_weights
from layerwave.errors import LayerwaveError

R = 5
SETTINGS = {"block": 8, "rho": 0.5, "sink_multiple": 3.0, "max_length": 128, "replicates": R}


def texts(number):
    rng = np.random.default_rng(3)
    words = "states drift over depth while a quiz in lazy prose keeps zest".split()
    return [{"text": " ".join(rng.choice(words, 40))[: rng.choice([60, 120])]} for _ in range(number)]


ROWS = texts(8)


@pytest.fixture(scope="module")
def calibration(target):
    return calibrate(target, ROWS, **SETTINGS)


@pytest.fixture(scope="module")
def halves(target):
    return [calibrate(target, ROWS[start::2], **SETTINGS) for start in (0, 1)]


def assert_equal_to_rounding(ours, theirs):
    for name in ("sums", "grams", "centred"):
        a, b = getattr(ours.replicates, name), getattr(theirs.replicates, name)
        assert a.shape == b.shape
        for layer in range(theirs.num_layers):
            np.testing.assert_allclose(a[:, layer], b[:, layer], rtol=0, atol=2e-5 * np.abs(b[:, layer]).max())
    np.testing.assert_array_equal(ours.sample_weights, theirs.sample_weights)


@pytest.fixture(scope="module")
def many():
    fingerprints = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    return sample_weights(fingerprints, 6, seed=0).astype(np.int64)


def test_bootstrap_weights_are_poisson_of_mean_and_variance_one(many):
    draws = many[len(SHARES) :]
    S = draws.shape[1]
    # Standard errors: of the mean 1/sqrt(S), of the variance sqrt((μ4 - 1)/S) with the fourth moment μ4 = 4.
    np.testing.assert_allclose(draws.mean(axis=1), 1, atol=4.5 / math.sqrt(S))
    np.testing.assert_allclose(draws.var(axis=1), 1, atol=4.5 * math.sqrt(3 / S))
    expected = np.array([math.exp(-1) / math.factorial(k) for k in range(6)])
    expected = S * np.append(expected, 1 - expected.sum())
    for draw in draws:
        observed = np.bincount(np.minimum(draw, 6), minlength=7)
        assert ((observed - expected) ** 2 / expected).sum() < 27.9  # chi-square, 6 degrees: 1e-4


def test_replicates_and_parts_are_independent(many):
    correlations = np.corrcoef(many)
    apart = correlations[len(SHARES) :] - np.eye(9)[len(SHARES) :]
    assert np.abs(apart).max() < 4.5 / math.sqrt(many.shape[1])


def test_parts_are_nested_and_of_their_shares(many):
    parts = many[: len(SHARES)]
    assert set(np.unique(parts)) == {0, 1}
    assert (np.diff(parts, axis=0) >= 0).all()
    np.testing.assert_allclose(parts.mean(axis=1), SHARES, atol=4.5 * 0.5 / math.sqrt(parts.shape[1]))


def test_weights_are_the_samples_own():
    fingerprints = np.arange(50, dtype=np.uint64) + np.uint64(2**63)
    weights = sample_weights(fingerprints, 8, seed=3)
    np.testing.assert_array_equal(sample_weights(fingerprints[::-1], 8, 3), weights[:, ::-1])
    np.testing.assert_array_equal(sample_weights(fingerprints[20:21], 8, 3), weights[:, 20:21])
    np.testing.assert_array_equal(sample_weights(fingerprints, 4, 3), weights[:-4])
    assert (sample_weights(fingerprints, 8, 4) != weights).any(axis=1).all()
    assert sample_weights(fingerprints, 0, 3).shape == (0, 50)


@pytest.mark.parametrize("sinks", ["keep", "drop"])
def test_replicates_are_weighted_sums_of_the_samples_own_calibrations(target, calibration, sinks):
    if sinks == "drop":
        calibration = calibrate(target, ROWS, **SETTINGS, sinks="drop")
    total = np.zeros_like(calibration.replicates.sums, dtype=np.float64)
    blocks = np.zeros(len(SHARES) + R)
    for row in ROWS:
        alone = calibrate(target, [row], **SETTINGS | {"replicates": 0}, sinks=sinks)
        place = int(np.flatnonzero(calibration.fingerprints == alone.fingerprints[0])[0])
        weights = calibration.sample_weights[:, place].astype(np.float64)
        index = 0 if sinks == "keep" else 1
        total += weights[:, None, None, None] * alone.sums[index]
        blocks += weights * alone.counts[index]
    ours = calibration.replicates.sums
    for layer in range(calibration.num_layers):
        scale = np.abs(total[:, layer]).max()
        np.testing.assert_allclose(ours[:, layer], total[:, layer], rtol=0, atol=2e-5 * scale)
    np.testing.assert_array_equal(calibration.sample_weights.astype(np.int64) @ calibration.sample_blocks, blocks)
    assert len({tuple(column) for column in calibration.sample_weights.tolist()}) > R


def test_grams_are_of_the_sums_raw_and_centred_over_tokens():
    sums = np.random.default_rng(0).standard_normal((2, 3, 6, 10)).astype(np.float32)
    sums[:, 1, :, 4] += 1e5  # a massive channel
    sums[:, 2] = sums[:, 2, :1]  # a layer that is constant over tokens
    made = Replicates.from_sums(sums, limit=256.0)
    double = sums.astype(np.float64)
    less_mean = double - double.mean(axis=2, keepdims=True)
    np.testing.assert_allclose(made.grams, double @ np.swapaxes(double, 2, 3), rtol=1e-12)
    np.testing.assert_allclose(made.centred, less_mean @ np.swapaxes(less_mean, 2, 3), rtol=1e-9, atol=1e-8)
    assert (made.centred[:, 2] == 0).all()
    np.testing.assert_array_equal(made.sums, sums)


@pytest.mark.parametrize(("rows", "batch_tokens"), [(ROWS, 128), (ROWS[::-1], 100_000)])
def test_batches_and_order_do_not_change_the_replicates(target, calibration, rows, batch_tokens):
    assert_equal_to_rounding(calibrate(target, rows, **SETTINGS, batch_tokens=batch_tokens), calibration)


def test_halves_merged_are_the_whole(calibration, halves):
    assert_equal_to_rounding(Calibration.merge(halves), calibration)


def test_switched_off(target, calibration, tmp_path):
    without = calibrate(target, ROWS, **SETTINGS | {"replicates": 0})
    assert without.replicates is None
    assert without.sample_weights.shape == (0, len(ROWS))
    assert "bootstrap replicates" not in without.summary
    np.testing.assert_allclose(without.sums, calibration.sums, rtol=0, atol=1e-5 * np.abs(calibration.sums).max())
    without.save(tmp_path / "cal.safetensors")
    assert Calibration.load(tmp_path / "cal.safetensors").replicates is None
    assert without.settings == calibration.without_replicates().settings
    given = Calibration.from_states(np.ones((2, 3, 4)))
    assert given.replicates is None
    assert given.without_replicates().settings is None


@pytest.mark.parametrize("keep", [True, False])
def test_saved_replicates_are_read_back(calibration, tmp_path, keep):
    if not keep:
        calibration = replace(calibration, replicates=replace(calibration.replicates, sums=None))
    calibration.save(tmp_path / "cal.safetensors")
    loaded = Calibration.load(tmp_path / "cal.safetensors").replicates
    for name in ("grams", "centred", "sums"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(calibration.replicates, name))
    assert (loaded.sums is not None) == keep


def test_sums_above_the_limit_leave_grams_that_do_not_merge(target, calibration, halves):
    # 8 accumulators x 4 layers x 8 tokens x 48 features x 4 bytes = 49,152 bytes
    at, below = (
        calibrate(target, ROWS[:4], **SETTINGS, replicate_megabytes=limit).replicates for limit in (0.049152, 0.049151)
    )
    assert at.sums.nbytes == 49_152
    assert below.sums is None
    np.testing.assert_array_equal(below.grams, at.grams)
    np.testing.assert_array_equal(below.centred, at.centred)

    grams_only = replace(halves[1], replicates=replace(halves[1].replicates, sums=None))
    assert "not kept" in " ".join(grams_only.summary)
    with pytest.raises(LayerwaveError, match=r"calibration 1 .* Grams without their sums.*replicate_megabytes of at"):
        Calibration.merge([halves[0], grams_only])
    merged = Calibration.merge([halves[0].without_replicates(), grams_only.without_replicates()])
    assert merged.replicates is None
    np.testing.assert_allclose(merged.sums, calibration.sums, rtol=0, atol=1e-5 * np.abs(calibration.sums).max())
    with pytest.raises(LayerwaveError, match=r"differ in replicates \(5 and 0\)"):
        Calibration.merge([halves[0], halves[1].without_replicates()])
    with pytest.raises(LayerwaveError, match=r"calibration 1 .* holds no replicates"):
        Calibration.merge([halves[0], replace(halves[1], replicates=None)])


def test_limits_of_parts_may_differ(halves):
    other = replace(halves[1], settings=replace(halves[1].settings, replicate_megabytes=512.0))
    assert Calibration.merge([halves[0], other]).replicates.sums is not None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda arrays: arrays.pop("replicate_centred"), "lacks replicate_centred"),
        (lambda arrays: arrays.update(replicate_sums=arrays["replicate_sums"][1:]), "expected 8 on axis C"),
        (lambda arrays: arrays.update(replicate_grams=arrays["replicate_grams"].astype(np.float32)), "is float32"),
    ],
)
def test_damaged_replicates_are_named(calibration, tmp_path, damage, message):
    from safetensors import safe_open

    path = tmp_path / "cal.safetensors"
    calibration.save(path)
    with safe_open(path, framework="numpy") as file:
        header = file.metadata()
    arrays = load_file(path)
    damage(arrays)
    save_file(arrays, path, header)
    with pytest.raises(LayerwaveError, match=message):
        Calibration.load(path)


@pytest.mark.parametrize(("field", "value"), [("replicates", -1), ("replicate_megabytes", -1.0)])
def test_settings_out_of_range(target, field, value):
    with pytest.raises(LayerwaveError, match=rf"^{field} is {value!r}, but must be"):
        calibrate(target, ROWS, **SETTINGS | {field: value})
