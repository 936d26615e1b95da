"""The artifact: what goes in comes out, halves make a whole, and what does not fit is refused."""

import json
from dataclasses import fields, replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from layerwave.calibration import Calibration, CalibrationSettings
from layerwave.errors import LayerwaveError

N, B, D = 5, 8, 6


def make(seed, samples=7, **changes):
    """A calibration with sums, curves and kept tokens that any pass could have left."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(40, 99, samples)
    kept = np.stack([lengths // 2, lengths // 2 - 1, lengths, lengths - 2])
    calibration = Calibration(
        sums=rng.standard_normal((4, N, B, D)).astype(np.float32),
        counts=(kept // B).sum(axis=1),
        curves=rng.random((4, samples, N)).astype(np.float32),
        kept=kept,
        lengths=lengths,
        sinks=np.full(samples, 2),
        fingerprints=np.sort(rng.integers(0, 2**63, samples).astype(np.uint64)),
        settings=CalibrationSettings(block=B),
        target_name="tiny",
        target_fingerprint="0123",
        target_dtype="float32",
        tallies={"rows": samples + 3, "rows without a word": 3},
    )
    return replace(calibration, **changes)


def assert_same(ours, theirs):
    for field in fields(Calibration):
        np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name))


@pytest.mark.parametrize(
    "calibration",
    [make(0), make(1, settings=CalibrationSettings(block=B, rho=1.0, sinks="drop", final_state="post_norm"))],
)
def test_a_saved_calibration_is_read_back_whole(tmp_path, calibration):
    calibration.save(tmp_path / "cal.safetensors")
    assert_same(Calibration.load(tmp_path / "cal.safetensors"), calibration)
    assert [path.name for path in tmp_path.iterdir()] == ["cal.safetensors"]


def test_given_states_are_read_back(tmp_path):
    states = np.random.default_rng(0).standard_normal((N, B, D)).astype(np.float32)
    calibration = Calibration.from_states(states)
    calibration.save(tmp_path / "cal.safetensors")
    loaded = Calibration.load(tmp_path / "cal.safetensors")
    assert_same(loaded, calibration)
    np.testing.assert_array_equal(loaded.states, states)
    assert loaded.num_layers == N


def test_anyone_can_read_the_header(tmp_path):
    calibration = make(0)
    calibration.save(tmp_path / "cal.safetensors")
    with safe_open(tmp_path / "cal.safetensors", framework="numpy") as file:
        header = file.metadata()
    assert json.loads(header["settings"])["rho"] == 0.3
    assert header["target_fingerprint"] == "0123"
    assert header["data_fingerprint"] == calibration.data_fingerprint
    assert json.loads(header["pools"])[1] == "filtered/drop"


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "cal.safetensors"
    make(0).save(path)
    path.with_name(f".{path.name}.tmp").touch()
    before = path.read_bytes()
    with pytest.raises(TypeError):
        make(1, tallies={"rows": object()}).save(path)
    assert path.read_bytes() == before
    with pytest.raises(LayerwaveError, match=r"absent.* cannot be written \(No such file or directory\)"):
        make(1).save(tmp_path / "absent" / "cal.safetensors")


def test_the_states_are_the_mean_of_the_pool_that_the_settings_choose():
    for index, (filtered, sinks) in enumerate([(True, "keep"), (True, "drop"), (False, "keep"), (False, "drop")]):
        calibration = make(0, settings=CalibrationSettings(block=B, sinks=sinks))
        expected = calibration.sums[index] / calibration.counts[index]
        np.testing.assert_allclose(calibration.pool(filtered=filtered), expected, rtol=1e-6)
        np.testing.assert_allclose(calibration.pool(filtered=filtered, sinks=sinks), expected, rtol=1e-6)
        np.testing.assert_array_equal(calibration.sample_curves(filtered=filtered), calibration.curves[index])
        if filtered:
            np.testing.assert_allclose(calibration.states, expected, rtol=1e-6)


def test_a_pool_that_is_not_there():
    calibration = make(0, counts=np.array([3, 0, 9, 9]))
    with pytest.raises(LayerwaveError, match="pool filtered/drop holds no block of 8 tokens"):
        calibration.pool(sinks="drop")
    with pytest.raises(LayerwaveError, match="one pool"):
        Calibration.from_states(np.ones((N, B, D), np.float32)).pool(filtered=False)


def test_the_summary_counts_tokens_and_blocks():
    kept = np.array([[7, 17]] * 4)
    summary = make(0, samples=2, kept=kept, lengths=np.array([20, 50]), sinks=np.array([1, 2])).summary
    assert summary["samples without a block"] == 1
    assert summary["kept tokens"] == 24
    assert summary["kept tokens in partial blocks, dropped"] == 7 + 1
    assert (summary["tokens"], summary["attention sinks"], summary["rows"]) == (70, 3, 5)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16, np.int32])
def test_states_of_any_number_type(dtype):
    states = np.arange(1, 1 + N * B * D).reshape(N, B, D).astype(dtype)
    assert Calibration.from_states(states).states.dtype == np.float32
    assert Calibration.from_states(jnp.ones((N, B, D))).num_layers == N


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((3, 1, 2), np.nan, "layer 3 hold NaN"),
        ((2, 0, 0), np.inf, "layer 2 hold NaN or infinity"),
        (1, 0, "layer 1 are all zero"),
    ],
)
def test_faulty_layers_are_named(place, value, message):
    states = np.ones((N, B, D))
    states[place] = value
    with pytest.raises(LayerwaveError, match=message):
        Calibration.from_states(states)


@pytest.mark.parametrize("shape", [(B, D), (0, B, D), (N, B, D, 1)])
def test_states_of_another_shape(shape):
    with pytest.raises(LayerwaveError, match=r"must be \(layers, block, features\)"):
        Calibration.from_states(np.ones(shape))


def test_merged_parts_are_the_sum_in_any_order():
    a, b, c = make(0), make(1, samples=4), make(2)
    merged = Calibration.merge([a, b, c])
    for left, right in [
        (merged, Calibration.merge([c, a, b])),
        (merged, Calibration.merge([Calibration.merge([c, b]), a])),
    ]:
        np.testing.assert_allclose(left.sums, right.sums, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(left.curves, right.curves)
        np.testing.assert_array_equal(left.fingerprints, right.fingerprints)
        assert left.data_fingerprint == right.data_fingerprint
    np.testing.assert_allclose(merged.sums, a.sums + b.sums + c.sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(merged.counts, a.counts + b.counts + c.counts)
    assert merged.tallies == {"rows": 10 + 7 + 10, "rows without a word": 9}
    place = int(np.flatnonzero(merged.fingerprints == b.fingerprints[2])[0])
    np.testing.assert_array_equal(merged.curves[:, place], b.curves[:, 2])
    np.testing.assert_array_equal(merged.kept[:, place], b.kept[:, 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": CalibrationSettings(block=B, rho=0.5)}, r"differ in rho \(0.3 and 0.5\)"),
        ({"settings": CalibrationSettings(block=B, sinks="drop")}, r"differ in sinks \(keep and drop\)"),
        ({"target_fingerprint": "4567"}, r"differ in target fingerprint \(0123 and 4567\)"),
        ({"target_dtype": "bfloat16"}, r"differ in target dtype"),
        ({"fingerprints": make(0).fingerprints}, r"7 of 14 samples stand in two"),
    ],
)
def test_parts_that_do_not_belong_together(changes, message):
    with pytest.raises(LayerwaveError, match=message):
        Calibration.merge([make(0), make(1, **changes)])


def test_merging_nothing_or_given_states():
    with pytest.raises(LayerwaveError, match="no calibration to merge"):
        Calibration.merge([])
    given = Calibration.from_states(np.ones((N, B, D)))
    with pytest.raises(LayerwaveError, match="from_states cannot be merged"):
        Calibration.merge([given, given])


def rewrite(path, arrays=None, **header):
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    save_file(load_file(path) | (arrays or {}), path, metadata | header)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"no such file"),
        (lambda path: path.write_text("hello"), r"not a whole safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), r"not a whole safetensors file"),
        (lambda path: save_file({"x": np.ones(3)}, path), r"of format None, but must be 'layerwave.calibration'"),
        (lambda path: rewrite(path, format_version="2"), r"format version .2. \(layerwave .*\), but must have 3: make"),
        (lambda path: rewrite(path, settings="{"), r"header that cannot be read"),
        (lambda path: rewrite(path, settings='{"rho": 7.0}'), r"header that cannot be read \(rho is 7.0"),
        (lambda path: rewrite(path, settings='{"new": 7}'), r"header that cannot be read .*'new'"),
        (lambda path: rewrite(path, {"counts": np.ones(3, np.int64)}), r"counts has shape \(3,\), expected 4"),
        (lambda path: rewrite(path, {"lengths": np.ones(3)}), r"lengths is float64 with 1 axes, expected int64"),
        (lambda path: rewrite(path, settings='{"block": 9}'), r"sums has shape .*, expected 9 on axis B"),
    ],
)
def test_a_file_that_is_not_a_whole_calibration(tmp_path, damage, message):
    path = tmp_path / "cal.safetensors"
    make(0).save(path)
    damage(path)
    with pytest.raises(LayerwaveError, match=message) as caught:
        Calibration.load(path)
    assert "cal.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_arrays_are_named(tmp_path):
    path = tmp_path / "cal.safetensors"
    make(0).save(path)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    save_file({name: array for name, array in arrays.items() if name != "curves"}, path, metadata)
    with pytest.raises(LayerwaveError, match="lacks curves"):
        Calibration.load(path)


def test_the_repr_is_one_short_line():
    assert repr(make(0)) == "Calibration(tiny: 5 layers x 6 features, block 8, 4 pools, 7 samples, rho=0.3)"


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([["a", "b"]], "real numbers"),
        (np.ones((N, B, D), complex), "complex128"),
        ([[[1.0, 2.0]], [[1.0]]], "no array"),
    ],
)
def test_states_that_are_no_real_array(states, message):
    with pytest.raises(LayerwaveError, match=message):
        Calibration.from_states(states)
