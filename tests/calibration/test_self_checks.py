"""What a pass checks of itself: that it finds nothing where all is right, and each planted fault; and near ties."""

import logging
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.calibration import Calibration, CalibrationSettings, calibrate, self_checks
from layerwave.calibration.self_checks import (
    LIMITS,
    Probe,
    check_head,
    check_rotations,
    check_scores,
    check_tokens,
    judged,
)
from layerwave.calibration.step import BatchResult, batch_step
from layerwave.calibration.stream import Work, warn_of_near_cuts
from layerwave.calibration.tokens import Batch, Samples
from layerwave.errors import LayerwaveError
from layerwave.selection import elsi, exhaustive
from layerwave.selection.result import Selection
from layerwave.targets.decoder import Decoder
from layerwave.warned import warn, warnings_kept

RNG = np.random.default_rng(0)
ROWS = [{"text": "".join(RNG.choice(list("abcdefgh "), size))} for size in (60, 50, 40, 110, 90)]
SETTINGS = {"block": 8, "max_length": 128, "replicates": 2, "fit_positions": 60, "score_positions": 40}


@pytest.fixture(scope="module")
def calibration(target):
    return calibrate(target, ROWS, **SETTINGS)


def test_a_sound_pass_deviates_by_rounding_alone_and_the_file_says_so(calibration, tmp_path):
    assert calibration.checks.keys() == LIMITS.keys()
    assert all(0 <= deviation < LIMITS[name][0].warning / 10 for name, deviation in calibration.checks.items())
    noted = replace(calibration, tokens=None, warnings=("one", "two"))
    noted.save(tmp_path / "a.safetensors")
    found = Calibration.load(tmp_path / "a.safetensors")
    assert (found.checks, found.warnings) == (calibration.checks, ("one", "two"))
    other = replace(noted, fingerprints=noted.fingerprints ^ np.uint64(1), warnings=("two", "three"))
    merged = Calibration.merge([part.without_replicates() for part in (noted, other)])
    assert (merged.checks, merged.warnings) == (calibration.checks, ("one", "two", "three"))


def test_the_self_checks_compile_nothing_of_the_pass_anew(target):
    batch_step.clear_cache()
    calibration = calibrate(target, ROWS, **SETTINGS)
    assert batch_step._cache_size() == calibration.tallies["compilations"] == 2


def test_a_sample_alone_is_told_from_one_that_sees_padding(target, monkeypatch):
    """Planted: tokens see those behind them, and so the padding and its length."""
    plain = Decoder.__call__

    def leaking(self, tokens, **options):
        length = tokens.shape[1]
        return plain(self, tokens, mask=jnp.ones((tokens.shape[0], length, length), bool), **options)

    monkeypatch.setattr(Decoder, "__call__", leaking)
    batch_step.clear_cache()
    with pytest.raises(LayerwaveError, match="self-check: states alone and in the batch, relative: differ by"):
        calibrate(target, ROWS, **SETTINGS)
    batch_step.clear_cache()


def test_a_probe_holds_the_shortest_sample_of_its_batch_alone(target):
    work = Work.prepare(target, ROWS, CalibrationSettings(**SETTINGS), 256)
    batch = work.plan[work.probed]
    probe = Probe.of(batch, work.gathering.batches[work.probed])
    length = batch.lengths[: len(batch.samples)].min()
    assert batch.tokens.size == min(other.tokens.size for other in work.plan)
    assert probe.alone.tokens.shape == batch.tokens.shape
    assert probe.alone.lengths.tolist() == [0] * (len(batch.tokens) - 1) + [length]
    np.testing.assert_array_equal(probe.alone.tokens[-1, :length], batch.tokens[probe.row, :length])
    assert (probe.alone.tokens[-1, length:] != 0).all()
    assert probe.where.shape == work.gathering.batches[work.probed].where.shape
    assert probe.where[1].max() < length - 1


@pytest.mark.parametrize("rounded", [False, True])
def test_logits_that_are_rounded_are_noticed(target, monkeypatch, rounded):
    """Planted: products of bfloat16, as accelerators make of float32 unless told otherwise."""
    normed = RNG.normal(size=(8, 48)).astype(np.float32)
    plain = Decoder.logits
    if rounded:
        half = jnp.bfloat16
        monkeypatch.setattr(Decoder, "logits", lambda self, x: plain(self, x.astype(half).astype(jnp.float32)))
    logits = np.asarray(normed, np.float64) @ np.asarray(target.decoder.head_weight(), np.float64).T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    checks = check_head(target.decoder, normed, -(shares * np.log(shares)).sum(axis=1).astype(np.float32))
    with warnings_kept() as warnings:
        judged(checks, half=False)
    assert ["logits in float32 and float64" in warning for warning in warnings] == ([True, False] if rounded else [])


def test_rotations_are_of_distances_alone(target, monkeypatch):
    (deviation,) = check_rotations(target, 512).values()
    assert deviation < 1e-5
    plain = self_checks.rotation
    monkeypatch.setattr(self_checks, "rotation", lambda positions, *rest: plain(positions**2, *rest))
    with pytest.raises(LayerwaveError, match="rotary positions"):
        judged(check_rotations(target, 512), half=False)


def test_one_bos_and_no_more(target):
    bos = target.tokenizer.bos_token_id
    one, two, none = (np.array([bos] * n + [70, 71], np.int32) for n in (1, 2, 0))

    def samples(*ids):
        return Samples(tuple(ids), np.zeros(len(ids), np.uint64), {})

    with warnings_kept() as warnings:
        check_tokens(target, samples(one, one), templated=True)
        assert warnings == []
        check_tokens(target, samples(one, none), templated=True)
    assert "1 of 2 samples do not begin with the BOS '<s>'" in warnings[0]
    with pytest.raises(LayerwaveError, match="1 of 2 samples begin with two BOS"):
        check_tokens(target, samples(one, two), templated=True)


def test_scores_in_float32_are_those_of_float64_unless_one_direction_outweighs_the_rest():
    states = RNG.normal(size=(6, 8, 48)).astype(np.float32)
    assert check_scores(states, 0)["scores of sets in float32 and float64, nats"] < 1e-5
    states[:, 0] *= 1e4
    checks = check_scores(states, 0)
    with warnings_kept() as warnings:
        judged({name: max(deviation, 2e-3) for name, deviation in checks.items()}, half=False)
    assert "scores of sets in float32 and float64" in warnings[0]


def test_a_deviation_that_is_no_number_is_an_error():
    with pytest.raises(LayerwaveError, match=r"rotary positions, relative: differ by nan, but at most by 0.1"):
        judged({"rotary positions, relative": float("nan")}, half=True)


def test_a_cut_between_two_tokens_that_are_nearly_tied_names_the_sample():
    batch = Batch((1, 0), np.zeros((3, 64), np.int32), np.array([9, 9, 0], np.int32))
    gaps = np.array([1e-7, 0.5, 0.0], np.float32)  # of the last row, which is padding, nothing is said
    result = BatchResult(*[np.zeros(3)] * 2, gaps, *[np.zeros(3)] * 3)
    samples = Samples((), np.array([5, 255], np.uint64), {})
    with warnings_kept() as warnings:
        warn_of_near_cuts([result], [batch], samples)
        warn_of_near_cuts([result._replace(gap=gaps + 1)], [batch], samples)
    assert len(warnings) == 1
    assert "in 1 of 2 samples" in warnings[0]
    assert "least 1.0e-07, sample 00000000000000ff" in warnings[0]


def test_near_ties_of_a_choice_are_named_and_kept(tmp_path):
    states = RNG.normal(size=(6, 8, 16))
    states[5] = states[4] * (1 + 1e-7)
    twins = Calibration.from_states(states)
    for found in (elsi(twins, size=1), exhaustive(twins, size=1)):
        (warning,) = found.warnings
        assert warning.startswith(f"near tie: {','.join(map(str, found.layers))} and ")
        assert "differ by less than 1e-05 in entropy" in warning
        found.save(tmp_path / "selection.json")
        assert Selection.load(tmp_path / "selection.json") == found
    apart = Calibration.from_states(RNG.normal(size=(6, 8, 16)) * np.arange(1, 7)[:, None, None])
    assert exhaustive(apart, size=2).warnings == ()


def test_warnings_are_said_once_and_kept_by_all_that_is_made_meanwhile(caplog):
    with caplog.at_level(logging.WARNING), warnings_kept() as outer:
        warn("first")
        with warnings_kept() as inner:
            warn("second")
        warn("second")
    warn("third")
    assert (outer, inner) == (["first", "second"], ["second"])
    assert [record.message for record in caplog.records] == ["first", "second", "second", "third"]
