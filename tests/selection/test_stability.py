"""Stability: the batched search against replicates run one by one, and what the result says."""

import math
from collections import Counter
from dataclasses import replace

import literal
import numpy as np
import problems
import pytest

from layerwave.calibration import Calibration, CalibrationSettings
from layerwave.calibration.replicates import SHARES, Replicates, sample_weights
from layerwave.errors import LayerwaveError
from layerwave.selection import elsi, elsi_c
from layerwave.selection.beam import beam_search, every_other_layer
from layerwave.selection.sets import ranking
from layerwave.selection.stability import ConvergencePoint, SetStability, Stability, stability

N, B, D, S, R = 8, 10, 12, 24, 7


def calibration_of(samples, replicates=R, first=0):
    """The calibration of samples that gave one block each: states (S, N, B, D)."""
    settings = CalibrationSettings(block=samples.shape[2], replicates=replicates)
    fingerprints = np.arange(first, first + len(samples), dtype=np.uint64)
    weights = sample_weights(fingerprints, replicates, settings.seed).astype(np.float32)
    sums = np.einsum("cs,snbd->cnbd", weights, samples).astype(np.float32)
    kept = np.full((4, len(samples)), samples.shape[2])
    return Calibration(
        sums=np.repeat(samples.sum(axis=0)[None], 4, axis=0).astype(np.float32),
        counts=np.full(4, len(samples)),
        curves=np.ones((4, len(samples), samples.shape[1]), np.float32),
        kept=kept,
        lengths=kept[0],
        sinks=np.zeros(len(samples), np.int64),
        fingerprints=fingerprints,
        settings=settings,
        target_name="made",
        target_fingerprint="0123",
        target_dtype="float32",
        tallies={},
        replicates=Replicates.from_sums(sums, limit=256.0) if replicates else None,
    )


def noisy(seed, noise=1.0, samples=S):
    """States of the kind that the seed chooses, and each sample's own noise on them."""
    rng = np.random.default_rng(seed)
    clean = problems.states(seed, N, B, D)
    scale = noise * np.sqrt((clean**2).mean(axis=(1, 2), keepdims=True))
    return (clean + scale * rng.standard_normal((samples, N, B, D))).astype(np.float32)


@pytest.fixture(scope="module")
def calibration():
    return calibration_of(noisy(0))


OPTIONS = [
    (0, "elsi", 3, {}),
    (1, "elsi", 1, {}),
    (4, "elsi", 2, {"alpha": 0.5, "weighting": "trace"}),
    (5, "elsi", 3, {"alpha": math.inf, "expand": 1}),
    (0, "elsi_c", 3, {}),
    (1, "elsi_c", 1, {}),
    (3, "elsi_c", 3, {"weighting": "trace", "pool": 2}),
    (4, "elsi_c", 2, {"estimator": "debiased"}),
    (5, "elsi_c", 3, {}),
]


@pytest.mark.parametrize(("seed", "method", "size", "options"), OPTIONS)
def test_batched_replicates_are_replicates_run_one_by_one(seed, method, size, options):
    calibration = calibration_of(noisy(seed))
    found = stability(calibration, size, method, beam=4, **options)
    one = {"elsi": elsi, "elsi_c": elsi_c}[method]
    runs = [one(Calibration.from_states(Z), size, 4, **options) for Z in calibration.replicates.sums]
    whole = one(calibration, size, 4, **options)

    assert found.layers == whole.layers
    assert found.score == pytest.approx(whole.score, abs=1e-9)
    draws = [run.layers for run in runs[len(SHARES) :]]
    assert {row.layers: row.frequency for row in found.sets if row.frequency} == {
        layers: count / R for layers, count in Counter(draws).items()
    }
    share = [sum(layer in layers for layers in draws) / R for layer in range(N)]
    np.testing.assert_allclose(found.layer_frequency, share, atol=1e-15)
    assert found.layer_frequency.sum() == pytest.approx(size)
    for point, run in zip(found.convergence, [*runs[: len(SHARES)], whole], strict=True):
        assert point.layers == run.layers
        assert point.score == pytest.approx(run.score, abs=1e-9)


def test_some_of_these_replicates_disagree():
    assert any(len(stability(calibration_of(noisy(seed))).sets) > 2 for seed in (0, 4, 5))


def test_intervals_are_those_of_literal_scores(calibration):
    asked = (0, N // 2, N - 1)
    row = next(row for row in stability(calibration, 3, sets=[asked]).sets if row.layers == asked)
    scores = [literal.entropy(Z.astype(np.float64), asked) for Z in calibration.replicates.sums[len(SHARES) :]]
    whole = literal.entropy(calibration.states.astype(np.float64), asked)
    assert row.score == pytest.approx(whole, abs=1e-9)
    assert row.shift == pytest.approx(np.mean(scores) - whole, abs=1e-9)
    assert row.low == pytest.approx(np.quantile(scores, 0.025) - row.shift, abs=1e-9)
    assert row.high == pytest.approx(np.quantile(scores, 0.975) - row.shift, abs=1e-9)


def test_every_depth_is_one_call_for_all_problems():
    rng = np.random.default_rng(0)
    values = rng.random((5, N))
    calls = {"score": [], "propose": []}

    def score(problems, sets):
        calls["score"].append(len(sets))
        return values[problems[:, None], sets].sum(axis=1)

    def propose(problems, sets):
        calls["propose"].append(len(sets))
        return every_other_layer(N)(problems, sets)

    levels, choice = beam_search(score, propose, N, 3, beam=4, expand=N, num_problems=5)
    assert len(calls["score"]) == 3
    assert calls["propose"] == [20, 20]
    best = np.sort(np.argsort(-values, axis=1)[:, :3], axis=1)  # a sum of values: the greedy set is the optimum
    np.testing.assert_array_equal(choice.sets, best)
    np.testing.assert_array_equal(choice.problems, np.arange(5))
    for problem in range(5):
        alone, _ = beam_search(lambda _, sets, p=problem: values[p][sets].sum(axis=1), propose, N, 3, 4, N)
        for level, single in zip(levels, alone, strict=True):
            np.testing.assert_array_equal(level.sets[level.problems == problem], single.sets)


def test_ranking_in_groups_is_ranking_each_group():
    rng = np.random.default_rng(0)
    sets, groups = rng.integers(0, 4, (60, 2)), rng.integers(0, 3, 60)
    scores = rng.integers(0, 5, 60) + 1e-14 * rng.standard_normal(60)  # many ties to rounding
    expected = [np.flatnonzero(groups == g)[ranking(scores[groups == g], sets[groups == g])] for g in range(3)]
    np.testing.assert_array_equal(ranking(scores, sets, groups), np.concatenate(expected))


def test_equal_samples_are_stable_and_settled():
    same = calibration_of(np.repeat(problems.states(0, N, B, D)[None], S, axis=0))
    found = stability(same)
    assert found.verdict == "stable"
    assert (found.frequency, found.settled_from, len(found.sets)) == (1, 0.125, 1)
    chosen = found.sets[0]
    assert chosen.shift == pytest.approx(0, abs=1e-6)
    assert chosen.low == pytest.approx(chosen.high, abs=1e-6)
    assert set(np.unique(found.layer_frequency)) == {0, 1}
    assert "Stable: layers " in found.reading
    assert "in 100% of 7 bootstrap replicates; 12.5 % of the samples already make this choice" in found.reading
    assert [point.share for point in found.convergence] == [*SHARES, 1]
    assert found.convergence[-1].samples == found.convergence[-1].blocks == found.samples == S


def test_noise_that_more_samples_would_average_out_is_told():
    """One clean direction under noise: the fewer samples, the greater the entropy. The replicates show it."""
    noise = np.random.default_rng(0).standard_normal((S, N, B, D))
    found = stability(calibration_of((3 + noise).astype(np.float32), replicates=32), 2)
    chosen = found.sets[0]
    assert chosen.shift > 0
    assert not chosen.settled
    assert chosen.low < chosen.score < chosen.high
    assert "not settled: replicates differ by +" in found.reading
    scores = [point.score for point in found.convergence]
    assert scores == sorted(scores, reverse=True)


def said(frequency=1.0, low=0.9, high=1.1, shift=0.0, chosen_at=(), rivals=()):
    """A result on three layers that chose (1, 2); `chosen_at` are the shares of the samples that do so too."""
    shares = (0.125, 0.25, 0.5, 1.0)
    choices = [((1, 2) if share == 1 or share in chosen_at else (0, 2)) for share in shares]
    return Stability(
        method="elsi",
        layers=(1, 2),
        score=1.0,
        replicates=20,
        empty=0,
        samples=8,
        layer_frequency=np.array([0.0, 1.0, 1.0]),
        sets=(SetStability((1, 2), frequency, 1.0, low, high, shift), *rivals),
        convergence=tuple(
            ConvergencePoint(share, int(8 * share), int(8 * share), layers, 1.0)
            for share, layers in zip(shares, choices, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("frequency", "verdict"), [(1.0, "stable"), (0.8, "stable"), (0.75, "fair"), (0.5, "fair"), (0.45, "unstable")]
)
def test_the_verdict(frequency, verdict):
    found = said(frequency)
    assert (found.verdict, found.frequency) == (verdict, frequency)
    assert found.reading.startswith(f"{verdict.capitalize()}: layers 1,2 come out in {frequency:.0%} of 20 bootstrap")


@pytest.mark.parametrize(("shift", "settled"), [(0.25, True), (-0.25, True), (0.26, False), (-0.26, False)])
def test_a_shift_of_half_the_interval_is_settled(shift, settled):
    found = said(low=0.75, high=1.25, shift=shift)
    assert found.sets[0].settled is settled
    assert found.reading.endswith(", 95 % interval 0.750 to 1.250." if settled else f" by {shift:+.3f} on average.")


@pytest.mark.parametrize(
    ("chosen_at", "share", "text"),
    [
        ((), 1.0, "; only all samples make this choice; "),
        ((0.5,), 0.5, "; 50 % of the samples already make this choice; "),
        ((0.125, 0.5), 0.5, "; 50 % of the samples already make this choice; "),
        ((0.125, 0.25), 1.0, "; only all samples make this choice; "),
        ((0.125, 0.25, 0.5), 0.125, "; 12.5 % of the samples already make this choice; "),
    ],
)
def test_from_which_share_on_the_choice_is_that_of_the_whole(chosen_at, share, text):
    found = said(chosen_at=chosen_at)
    assert found.settled_from == share
    assert text in found.reading


def test_the_first_rival_that_a_replicate_chose_is_named():
    asked, rival = (SetStability(layers, share, 1.0, 0.9, 1.1, 0.0) for layers, share in (((0, 1), 0.0), ((0, 2), 0.4)))
    assert ", 0,2 in 40%; " in said(0.6, rivals=(rival, asked)).reading
    assert " of 20 bootstrap replicates; " in said(0.6, rivals=(asked,)).reading


def test_merged_halves_are_the_whole(calibration):
    samples = noisy(0)
    parts = [calibration_of(samples[:9]), calibration_of(samples[9:], first=9)]
    for method in ("elsi", "elsi_c"):
        whole, merged = (stability(cal, 3, method) for cal in (calibration, Calibration.merge(parts)))
        assert merged.layers == whole.layers
        np.testing.assert_array_equal(merged.layer_frequency, whole.layer_frequency)
        assert [row.layers for row in merged.sets] == [row.layers for row in whole.sets]
        for a, b in zip(merged.sets, whole.sets, strict=True):
            assert (a.score, a.low, a.high) == pytest.approx((b.score, b.low, b.high), abs=1e-5)
        assert [(p.samples, p.blocks, p.layers) for p in merged.convergence] == [
            (p.samples, p.blocks, p.layers) for p in whole.convergence
        ]


def test_replicates_without_a_block_are_left_out_and_counted():
    single = calibration_of(noisy(0, samples=1), replicates=32)
    drawn = int((single.sample_weights[len(SHARES) :] > 0).sum())
    found = stability(single, 2)
    assert 0 < found.empty < 32
    assert (found.replicates, found.empty) == (drawn, 32 - drawn)
    inside = single.sample_weights[: len(SHARES), 0]
    assert [p.share for p in found.convergence] == [share for share, w in zip(SHARES, inside, strict=True) if w] + [1]


def test_grams_are_enough(calibration):
    grams_only = replace(calibration, replicates=replace(calibration.replicates, sums=None))
    assert stability(grams_only, 2).sets == stability(calibration, 2).sets


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda c: replace(c, replicates=None), {}, "holds no bootstrap replicates.*--replicates 32"),
        (lambda c: Calibration.from_states(c.states), {}, "given with from_states have no bootstrap replicates"),
        (lambda c: calibration_of(noisy(0), replicates=1), {}, "1 of 1 replicates hold a block, but at least 2 must"),
        (lambda c: c, {"method": "exhaustive"}, "method 'exhaustive': choose elsi or elsi_c"),
        (lambda c: c, {"size": N + 1}, "between 1 and the number of layers, 8"),
        (lambda c: c, {"beam": 0}, "beam is 0"),
        (lambda c: c, {"weighting": "norm"}, "unknown weighting 'norm'"),
        (lambda c: c, {"sets": [(1, 99)]}, "layer 99 is out of range"),
    ],
)
def test_faults(calibration, change, arguments, message):
    with pytest.raises(LayerwaveError, match=message):
        stability(change(calibration), **arguments)


@pytest.mark.parametrize("first", [0, 1])  # the second: only replicates without the first sample have such a layer
def test_a_layer_of_zeros_is_named_though_it_be_so_in_a_replicate_alone(first):
    samples = noisy(0)
    samples[first:, 5] = 0
    with pytest.raises(LayerwaveError, match="layer 5 are all zero"):
        stability(calibration_of(samples), 2)


def test_a_constant_layer_is_named(calibration):
    samples = noisy(0)
    samples[:, 5] = samples[:, 5, :1]
    constant = calibration_of(samples)
    assert stability(constant, 2).replicates == R
    with pytest.raises(LayerwaveError, match="layer 5 is constant over tokens"):
        stability(constant, 2, "elsi_c")
