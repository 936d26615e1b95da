"""Predicted acceptance against its literal definition in primal form, on planted truths, and where it is refused."""

import gc
import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from layerwave.calibration import Calibration, CalibrationSettings, calibrate
from layerwave.calibration.token_sample import TokenSample
from layerwave.cli import main
from layerwave.errors import LayerwaveError
from layerwave.selection import (
    PredictedAcceptance,
    Selection,
    acceptance,
    elsi,
    exhaustive,
    predicted_acceptance,
)
from layerwave.targets import load_target
from tests.token_samples import planted_tokens, with_tokens

SIZES = [(3,), (0, 3), (1, 2, 3)]


# The definition, said literally: concatenated features, normal equations, float64


def softmax(logits):
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def scaled(block, fitting):
    """Features of which the fitting rows have a mean squared norm of 1."""
    return block / np.sqrt(np.mean(np.sum(block[fitting] ** 2, axis=1)))


def ridge_regression(features, targets, rows, ridge):
    """Predictions everywhere of the regression on these rows; the mean target is not penalised."""
    F, mean = features[rows], targets[rows].mean(axis=0)
    return features @ np.linalg.solve(F.T @ F + ridge * np.eye(F.shape[1]), F.T @ (targets[rows] - mean)) + mean


def chosen_ridge(held_out):
    """Uphill over decades from 0.1, a smaller λ being worth 3e-4 less each; then the vertex of a parabola."""
    value = {exponent: held_out(10.0**exponent) + 3e-4 * exponent for exponent in range(-5, 4)}
    top = -1
    while top < 3 and value[top + 1] >= value[top]:
        top += 1
    while top > -5 and value[top - 1] > value[top]:
        top -= 1
    if top in (-5, 3):
        return 10.0**top
    a, b, c = (value[top + step] for step in (-1, 0, 1))
    return 10 ** (top + (a - c) / (2 * (a - 2 * b + c)))


def literal(tokens, layers, weighting="raw", sinks="keep"):
    """α̂, top-1 agreement and λ of one set."""
    kept = ~tokens.sinks if sinks == "drop" else np.ones(len(tokens.sinks), bool)
    states, embeddings, normed, head = (
        a.astype(np.float64)
        for a in (tokens.states[:, kept], tokens.embeddings[kept], tokens.normed[kept], tokens.head)
    )
    scoring = (np.arange(len(kept)) >= len(kept) - len(tokens.top_tokens))[kept]
    samples = tokens.samples[kept]

    states = np.concatenate(
        [scaled(states[l], ~scoring) if weighting == "trace" else states[l] for l in layers], axis=1
    )
    embeddings /= np.sqrt(np.mean(embeddings**2, axis=1, keepdims=True))
    features = np.concatenate([scaled(states, ~scoring), scaled(embeddings, ~scoring)], axis=1)
    p = softmax(normed @ head.T)

    def overlap(predicted, rows):
        return np.minimum(p[rows], softmax(predicted[rows] @ head.T)).sum(axis=1).mean()

    # The first samples by fingerprint are fitted: as many as come nearest to three quarters of the positions.
    names = np.unique(samples[~scoring])
    firsts = [~scoring & np.isin(samples, names[:count]) for count in range(1, len(names))]
    inner = min(firsts, key=lambda rows: abs(rows.sum() - 0.75 * np.sum(~scoring)))
    choosing = ~scoring & ~inner
    ridge = chosen_ridge(lambda ridge: overlap(ridge_regression(features, normed, inner, ridge), choosing))
    predicted = ridge_regression(features, normed, ~scoring, ridge)
    agreement = np.mean((predicted[scoring] @ head.T).argmax(axis=1) == p[scoring].argmax(axis=1))
    return overlap(predicted, scoring), agreement, ridge


def random_tokens(seed, num_layers, fitting, scoring, features, width=None, vocabulary=60, samples=12, sinks=0.0):
    """States with a common part and growing norms; the targets are half known from them, and half noise."""
    rng = np.random.default_rng(seed)
    count, width = fitting + scoring, width or features
    decay = 1 / np.sqrt(1 + np.arange(features))
    normed = 6 * rng.normal(size=(count, features)) * decay
    states = np.stack(
        [
            1.3**l * (rng.normal(size=width) + rng.normal(size=(count, width)) + normed @ mix / (3 + abs(l - 2)))
            for l, mix in enumerate(rng.normal(size=(num_layers, features, width)) / np.sqrt(features))
        ]
    )
    embeddings = rng.normal(size=(count, features)) + normed / 4
    is_sink = rng.random(count) < sinks
    states[:, is_sink] = 40 * rng.normal(size=width)
    head = rng.normal(size=(vocabulary, features)) / 2
    logits = normed[fitting:] @ head.T
    of_sample = np.concatenate([rng.integers(samples, size=fitting), samples + rng.integers(samples, size=scoring)])
    return TokenSample(
        states=states.astype(np.float32),
        embeddings=embeddings.astype(np.float32),
        normed=normed.astype(np.float32),
        head=head.astype(np.float32),
        vocabulary=np.arange(vocabulary, dtype=np.int32),
        top_tokens=np.argsort(-logits, axis=1)[:, :8].astype(np.int32),
        log_normaliser=np.log(np.exp(logits).sum(axis=1)).astype(np.float32),
        samples=rng.permutation(2 * samples).astype(np.uint64)[of_sample],
        positions=np.arange(count, dtype=np.int32),
        priorities=np.arange(count, dtype=np.uint64),
        sinks=is_sink,
    )


def calibration_with(tokens, sinks="keep", seed=0):
    states = np.random.default_rng(seed).normal(size=(len(tokens.states), 8, 6))
    base = replace(Calibration.from_states(states), settings=CalibrationSettings(block=8, replicates=0, sinks=sinks))
    return with_tokens(base, tokens)


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(0, num_layers=4, fitting=90, scoring=60, features=24)


@pytest.fixture(scope="module")
def calibration(tokens):
    return calibration_with(tokens)


def assert_literal(found, tokens, *, weighting="raw", sinks="keep"):
    for row, layers in enumerate(found.sets):
        value, agreement, ridge = literal(tokens, layers, weighting, sinks)
        assert 1e-3 < ridge < 1e2  # where float32 suffices and λ matters
        assert found.value[row] == pytest.approx(value, abs=1e-4)
        assert np.log10(found.ridge[row]) == pytest.approx(np.log10(ridge), abs=0.1)  # the top may be flat
        # One position may have its two most probable tokens equally probable, to rounding.
        assert abs(found.agreement[row] - agreement) <= 1.001 / found.counts.sum()


@pytest.mark.parametrize("weighting", ["raw", "trace"])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_layers": 4, "fitting": 90, "scoring": 60, "features": 24},
        {"num_layers": 5, "fitting": 60, "scoring": 33, "features": 40, "samples": 7},  # more features than positions
        {"num_layers": 4, "fitting": 150, "scoring": 20, "features": 10, "vocabulary": 9},
        {"num_layers": 4, "fitting": 90, "scoring": 60, "features": 24, "width": 16},  # projected states
    ],
)
def test_equal_to_the_literal_definition(shape, weighting):
    tokens = random_tokens(7, **shape)
    found = predicted_acceptance(calibration_with(tokens), SIZES, weighting=weighting)
    assert found.sets == tuple(SIZES)
    assert_literal(found, tokens, weighting=weighting)


@pytest.mark.parametrize("sinks", ["keep", "drop"])
def test_sinks_are_used_as_the_settings_say(sinks):
    tokens = random_tokens(3, num_layers=4, fitting=90, scoring=60, features=20, sinks=0.05)
    assert 2 < tokens.sinks.sum() < 20
    found = predicted_acceptance(calibration_with(tokens, sinks), [(0, 3)])
    assert found.counts.sum() == 60 - (tokens.sinks[90:].sum() if sinks == "drop" else 0)
    assert_literal(found, tokens, sinks=sinks)


@pytest.fixture(scope="module")
def stories260k(shared_data):
    conversations = json.loads((shared_data / "merged_sharegpt.json").read_text())
    rows = [{"text": row["conversations"][0]["value"][:500]} for row in conversations[:60]]
    settings = CalibrationSettings(samples=40, max_length=128, replicates=0, fit_positions=400, score_positions=200)
    return calibrate(load_target(shared_data / "stories260k"), rows, settings)


def test_equal_to_the_literal_definition_on_a_real_checkpoint(stories260k):
    found = predicted_acceptance(stories260k, [(0,), (4,), (1, 4), (0, 2, 4)])
    assert_literal(found, stories260k.tokens)
    assert 0.5 < found.covered <= 1.001


def test_the_command_line_selects_by_acceptance(stories260k, tmp_path):
    stories260k.save(tmp_path / "cal.safetensors")
    out = tmp_path / "selection.json"
    main(["select", str(tmp_path / "cal.safetensors"), "--criterion", "acceptance", "--size", "2", "--out", str(out)])
    found = Selection.load(out)
    assert (found.method, found.criterion) == ("elsi", "acceptance")
    assert found.layers == elsi(stories260k, 2, criterion="acceptance").layers
    assert found.score == pytest.approx(literal(stories260k.tokens, found.layers)[0], abs=1e-4)


def test_leaving_out_small_components_changes_little(monkeypatch):
    tokens = random_tokens(5, num_layers=4, fitting=330, scoring=150, features=300)
    head = tokens.head / 3  # logits of standard deviation 2.5, as language models have them
    mass = np.exp(tokens.normed[330:] @ head.T).sum(axis=1)
    tokens = replace(tokens, head=head, log_normaliser=np.log(mass))

    def values(left_over):
        monkeypatch.setattr(acceptance, "LEFT_OVER", left_over)
        calibration = calibration_with(tokens)
        found = predicted_acceptance(calibration, [(0, 3)])
        return found.value, acceptance._SCORERS[calibration].problem.targets.shape[1]

    (full, all_of_them), (compressed, kept), (crude, few) = (values(share) for share in (1e-9, 0.01, 0.5))
    assert few < kept < all_of_them == 300
    assert np.abs(compressed - full).max() < 1e-3
    assert np.abs(crude - full).max() > 1e-3
    assert full[0] == pytest.approx(literal(tokens, (0, 3))[0], abs=1e-3)  # λ is chosen on leading components


# Invariances


def with_changes(tokens, **changes):
    return predicted_acceptance(calibration_with(replace(tokens, **changes)), SIZES)


def test_rotation_scale_and_order_change_nothing(tokens, calibration):
    found = predicted_acceptance(calibration, SIZES).value
    rng = np.random.default_rng(1)
    rotation = np.linalg.qr(rng.normal(size=(24, 24)))[0]
    turned = tokens.states.copy()
    turned[3] = (turned[3].astype(np.float64) @ rotation).astype(np.float32)
    np.testing.assert_allclose(with_changes(tokens, states=turned).value, found, atol=1e-4)
    np.testing.assert_allclose(with_changes(tokens, states=tokens.states * np.float32(1e9)).value, found, atol=1e-4)
    np.testing.assert_allclose(
        with_changes(tokens, embeddings=tokens.embeddings * np.float32(1e-3)).value, found, atol=1e-4
    )
    swapped = predicted_acceptance(calibration, [(3,), (3, 0), (3, 1, 2)])
    np.testing.assert_array_equal(swapped.value, found)
    assert swapped.sets == tuple(SIZES)


def test_scale_of_one_layer_matters_raw_and_not_by_trace(tokens, calibration):
    grown = tokens.states.copy()
    grown[0] *= 8
    changed = calibration_with(replace(tokens, states=grown))
    raw, trace = (
        [predicted_acceptance(c, [(0, 3)], weighting=weighting).value[0] for c in (calibration, changed)]
        for weighting in ("raw", "trace")
    )
    assert trace[1] == pytest.approx(trace[0], abs=1e-4)
    assert abs(raw[1] - raw[0]) > 1e-3


def test_the_order_of_positions_does_not_matter(tokens, calibration):
    rng = np.random.default_rng(2)
    fit, score = rng.permutation(90), rng.permutation(60)
    order = np.concatenate([fit, 90 + score])
    columns = ("embeddings", "normed", "samples", "positions", "priorities", "sinks")
    moved = with_changes(
        tokens,
        states=tokens.states[:, order],
        top_tokens=tokens.top_tokens[score],
        log_normaliser=tokens.log_normaliser[score],
        **{name: getattr(tokens, name)[order] for name in columns},
    )
    found = predicted_acceptance(calibration, SIZES)
    np.testing.assert_allclose(moved.by_sample, found.by_sample, atol=1e-4 * found.counts.max())
    np.testing.assert_array_equal(moved.counts, found.counts)


def test_copies_of_a_layer_add_nothing(tokens):
    copies = tokens.states.copy()
    copies[1] = copies[3]
    found = predicted_acceptance(calibration_with(replace(tokens, states=copies)), [(1,), (3,), (1, 3)])
    assert found.value[0] == found.value[1]
    assert found.value[2] == pytest.approx(found.value[1], abs=1e-4)


def test_bfloat16_states_are_read(tokens, calibration):
    import ml_dtypes

    rounded = {name: getattr(tokens, name).astype(ml_dtypes.bfloat16) for name in ("states", "embeddings", "normed")}
    assert with_changes(tokens, **rounded).value == pytest.approx(
        predicted_acceptance(calibration, SIZES).value, abs=5e-3
    )


# Planted truth


def test_the_search_finds_the_planted_layers():
    calibration = calibration_with(planted_tokens(7, (2, 5)))
    for find in (elsi, exhaustive):
        pair = find(calibration, 2, beam=3, criterion="acceptance")
        assert (pair.layers, pair.criterion) == ((2, 5), "acceptance")
        assert {2, 5} < set(find(calibration, 3, beam=2, criterion="acceptance").layers)
    assert elsi(calibration, 1, criterion="acceptance").layers == (5,)  # of those after the middle
    assert exhaustive(calibration, 1, criterion="acceptance").beams[0][0][0] == (2,)
    assert pair.score == pytest.approx(literal(calibration.tokens, (2, 5))[0], abs=1e-4)


def conversations_with_a_sink(factor):
    """Calibration of 24 conversations of 24 tokens: block means and token sample of the same states.

    The target's next state is linear in layers 1 and 4, whose states fill all features; the other layers are noise of
    rank 3. At the first token of every conversation all layers but 0 and 5 hold one vector, `factor` times as long.
    """
    rng = np.random.default_rng(4)
    N, S, T, D, V = 6, 24, 24, 16, 40
    known = (1, 4)
    states = np.stack(
        [
            rng.normal(size=(S, T, D)) if l in known else rng.normal(size=(S, T, 3)) @ rng.normal(size=(3, D))
            for l in range(N)
        ]
    )
    mixes = rng.normal(size=(2, D, D)) / np.sqrt(D)
    normed = 2 * (states[1] @ mixes[0] + states[4] @ mixes[1]) + 0.5 * rng.normal(size=(S, T, D))
    states[1:5, :, 0] = factor * rng.normal(size=(4, 1, D))
    head = rng.normal(size=(V, D))
    blocks = states.mean(axis=1)  # every conversation is one block
    flat = np.arange(S * T)
    logits = (normed.reshape(-1, D) @ head.T)[S * T // 2 :]
    tokens = TokenSample(
        states=states.reshape(N, S * T, D).astype(np.float32),
        embeddings=rng.normal(size=(S * T, D)).astype(np.float32),
        normed=normed.reshape(-1, D).astype(np.float32),
        head=head.astype(np.float32),
        vocabulary=np.arange(V, dtype=np.int32),
        top_tokens=np.argsort(-logits, axis=1)[:, :8].astype(np.int32),
        log_normaliser=np.log(np.exp(logits).sum(axis=1)).astype(np.float32),
        samples=(flat // T).astype(np.uint64),
        positions=(flat % T).astype(np.int32),
        priorities=flat.astype(np.uint64),
        sinks=(flat % T == 0) & (factor > 10),
    )
    return with_tokens(Calibration.from_states(blocks), tokens)


def test_a_sink_fools_the_entropy_and_not_the_acceptance():
    without, with_sink = conversations_with_a_sink(1), conversations_with_a_sink(100)
    assert elsi(without, 2).layers == (1, 4)
    assert elsi(with_sink, 2).layers == (0, 5)
    for calibration in (without, with_sink):
        assert elsi(calibration, 2, criterion="acceptance").layers == (1, 4)
    found = predicted_acceptance(with_sink, [(1, 4), (0, 5)])
    value, error = found.difference(0, 1)
    assert value > 5 * error


# What a result says


def test_the_standard_error_is_that_of_a_bootstrap_over_samples():
    tokens = random_tokens(9, num_layers=4, fitting=60, scoring=300, features=12, samples=30)
    found = predicted_acceptance(calibration_with(tokens), SIZES)
    draws = np.random.default_rng(0).integers(30, size=(4000, 30))
    for sums, error in zip(found.by_sample, found.standard_error, strict=True):
        bootstrap = (sums[draws].sum(axis=1) / found.counts[draws].sum(axis=1)).std(ddof=1)
        assert error == pytest.approx(bootstrap, rel=0.1)


def test_errors_are_those_of_samples_and_not_of_positions():
    sums = np.array([[9.0, 1.0, 8.0, 2.0]])
    found = PredictedAcceptance(((0,),), sums, np.full(4, 10), np.zeros(1), np.ones(1), 1.0)
    assert found.value == [0.5]
    # Means of the samples are 0.9, 0.1, 0.8, 0.2; with equal counts it is their standard error.
    assert found.standard_error[0] == pytest.approx(np.std([0.9, 0.1, 0.8, 0.2], ddof=1) / 2)


def test_differences_are_paired(calibration):
    found = predicted_acceptance(calibration, SIZES)
    value, error = found.difference(2, 0)
    assert value == pytest.approx(found.value[2] - found.value[0])
    residuals = []
    for with_three, with_one, count in zip(found.by_sample[2], found.by_sample[0], found.counts, strict=True):
        residuals.append(with_three - with_one - value * count)
    S, n = len(found.counts), sum(found.counts)
    assert error == pytest.approx((S / (S - 1) * sum(r * r for r in residuals)) ** 0.5 / n)
    assert error < np.hypot(found.standard_error[2], found.standard_error[0])
    assert found.difference(0, 2) == (-value, pytest.approx(error))
    assert found.difference(1, 1) == (0, 0)


def test_the_best_of_equals_has_fewer_and_lower_layers():
    sets = ((0, 1), (3,), (2,), (4,))
    sums = np.array([[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [1.0, 2.0]])
    assert PredictedAcceptance(sets, sums, np.full(2, 4), np.zeros(4), np.ones(4), 1.0).best == 2


def test_every_set_is_scored_once_in_any_order_and_size(calibration, monkeypatch):
    together = predicted_acceptance(calibration, [(1, 2, 3), (3,), (0, 3), (3,), (2,)])
    monkeypatch.setattr(acceptance, "set_acceptance", None)  # nothing is left to compute
    again = predicted_acceptance(calibration, np.array([[3], [2]]))
    np.testing.assert_array_equal(again.by_sample, together.by_sample[[1, 4]])
    np.testing.assert_array_equal(together.by_sample[1], together.by_sample[3])
    assert together.sets == ((1, 2, 3), (3,), (0, 3), (3,), (2,))
    assert predicted_acceptance(calibration, np.empty((0, 2), int)).by_sample.shape == (0, len(together.counts))


def test_sets_in_calls_as_for_an_accelerator(tokens, calibration, monkeypatch):
    singles = [(layer,) for layer in range(4)] + [(0, 1), (0, 2), (0, 3)]
    found = predicted_acceptance(calibration, singles)
    monkeypatch.setattr(acceptance.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(acceptance, "CALL", 3)
    monkeypatch.setattr(acceptance, "BATCH", 2)
    many = predicted_acceptance(calibration_with(tokens), singles)
    np.testing.assert_allclose(many.value, found.value, atol=1e-4)


def test_scores_are_forgotten_with_their_calibration(tokens):
    before = len(acceptance._SCORERS)
    calibration = calibration_with(tokens)
    predicted_acceptance(calibration, [(0,)])
    assert len(acceptance._SCORERS) == before + 1
    del calibration
    gc.collect()
    assert len(acceptance._SCORERS) == before


# What is refused, and what is warned of


def refused(tokens, match, **changes):
    with pytest.raises(LayerwaveError, match=match):
        with_changes(tokens, **changes)


def test_no_token_sample(calibration):
    given = Calibration.from_states(np.ones((4, 3, 2)))
    for without, origin in ((replace(calibration, tokens=None), "this calibration holds"), (given, "from_states have")):
        with pytest.raises(LayerwaveError, match=f"{origin} no token sample.*without --no-token-sample"):
            predicted_acceptance(without, SIZES)
        with pytest.raises(LayerwaveError, match="no token sample"):
            elsi(without, 2, criterion="acceptance")


def first(tokens, fitting, scoring):
    """The token sample of the first positions of each side."""
    scores = np.flatnonzero(tokens.scoring)[:scoring]
    rows = np.concatenate([np.flatnonzero(tokens.fitting)[:fitting], scores])
    columns = ("embeddings", "normed", "samples", "positions", "priorities", "sinks")
    return replace(
        tokens,
        states=tokens.states[:, rows],
        top_tokens=tokens.top_tokens[:scoring],
        log_normaliser=tokens.log_normaliser[:scoring],
        **{name: getattr(tokens, name)[rows] for name in columns},
    )


def test_too_few_positions_or_samples(tokens, caplog):
    refused(first(tokens, 15, 60), "15 positions of .* at least 16 fitting positions.*more or longer conversations")
    refused(first(tokens, 90, 0), "0 of 0 to score")
    refused(first(tokens, 90, 1), "1 of 1 to score.*two samples on each side.*more positions on the smaller side")
    alone = np.where(tokens.fitting, tokens.samples[0], tokens.samples)
    refused(tokens, "90 positions of 1 samples to fit", samples=alone)
    sinks = tokens.fitting & (np.arange(150) >= 10)
    with pytest.raises(LayerwaveError, match="10 positions"):
        predicted_acceptance(calibration_with(replace(tokens, sinks=sinks), "drop"), SIZES)
    assert predicted_acceptance(calibration_with(first(tokens, 16, 10)), SIZES).counts.sum() == 10
    assert "fitted on 16 positions" in caplog.text


@pytest.mark.parametrize(("positions", "warned"), [(255, True), (256, False)])
def test_fewer_than_256_fitting_positions_are_warned_of(positions, warned, caplog):
    names = (np.arange(positions) % 3).astype(np.uint64)
    acceptance._check_positions(names, names[:8] + np.uint64(3))
    assert (f"fitted on {positions} positions of 3 samples only" in caplog.text) == warned


def test_a_warning_of_the_token_sample_is_in_every_selection_that_it_made(tokens):
    calibration = calibration_with(first(tokens, 20, 30))
    for found in (elsi(calibration, 1, criterion="acceptance"), exhaustive(calibration, 1, criterion="acceptance")):
        assert any("fitted on 20 positions" in warning for warning in found.warnings)


def broken(array, value, *place):
    changed = array.copy()
    changed[place] = value
    return changed


def test_states_that_cannot_be_fitted(tokens):
    refused(tokens, "layer 2 hold NaN", states=broken(tokens.states, np.nan, 2, 5, 1))
    refused(tokens, "layer 1 hold NaN", states=broken(tokens.states, np.inf, 1, 140))  # a scoring position
    refused(tokens, "layer 3 are all zero", states=broken(tokens.states, 0, 3))
    refused(tokens, "layer 3 are all zero", states=broken(tokens.states, 0, 3, slice(90)))
    refused(tokens, "embeddings of the token sample hold NaN", embeddings=broken(tokens.embeddings, np.nan, 1))
    refused(tokens, "final-normed states of the token sample hold", normed=broken(tokens.normed, np.inf, 130))
    refused(tokens, "head of the token sample hold", head=broken(tokens.head, np.nan, 0, 0))
    refused(tokens, "embeddings of the token sample are all zero", embeddings=np.zeros_like(tokens.embeddings))
    refused(tokens, "same at every position", normed=np.ones_like(tokens.normed))
    huge = np.float32(1e25)  # its square overflows
    refused(
        tokens,
        r"layers \[3\] cannot be fitted in float32.*huge values",
        normed=tokens.normed * huge,
        head=tokens.head / huge,
    )


def test_one_zero_embedding_is_no_fault(tokens):
    assert np.isfinite(with_changes(tokens, embeddings=broken(tokens.embeddings, 0, 7)).value).all()


def test_a_vocabulary_that_misses_the_mass(tokens, caplog):
    refused(
        tokens,
        r"33\.3% of the target's.*more score_positions",
        log_normaliser=tokens.log_normaliser + np.float32(np.log(3)),
    )
    with caplog.at_level(logging.WARNING, "layerwave"):
        found = with_changes(tokens, log_normaliser=tokens.log_normaliser + np.float32(np.log(1.25)))
    assert found.covered == pytest.approx(0.8, abs=1e-4)
    assert "80.0%" in caplog.text


@pytest.mark.parametrize(
    ("covered", "said"), [(0.499, "error"), (float("nan"), "error"), (0.5, "warning"), (0.899, "warning"), (0.9, "")]
)
def test_how_much_of_the_mass_is_enough(covered, said, caplog):
    if said == "error":
        with pytest.raises(LayerwaveError, match=r"too little to score drafts by \(at least 50%\)"):
            acceptance._check_covered(covered)
    else:
        acceptance._check_covered(covered)
    assert ("would bring more tokens" in caplog.text) == (said == "warning")


@pytest.mark.parametrize("rows", [300, 200])  # more than the 260 features, and fewer
def test_directions_leave_a_hundredth_of_the_variance_and_no_more(rows):
    rng = np.random.default_rng(6)
    Y = rng.normal(size=(rows, 260)) * 0.99 ** np.arange(260) @ np.linalg.qr(rng.normal(size=(260, 260)))[0]
    directions = acceptance._leading_directions(Y)
    variances = np.linalg.svd(Y, compute_uv=False) ** 2
    kept = next(k for k in range(len(variances)) if variances[:k].sum() >= 0.99 * variances.sum())
    assert directions.shape == (260, kept)
    np.testing.assert_allclose(directions.T @ directions, np.eye(kept), atol=1e-9)
    np.testing.assert_allclose(np.sum((Y @ directions) ** 2, axis=0), variances[:kept], rtol=1e-8)


def test_of_few_features_all_are_directions_the_leading_ones_first():
    Y = np.random.default_rng(6).normal(size=(9, 256)) * np.random.default_rng(7).permutation(256)
    directions = acceptance._leading_directions(Y)
    np.testing.assert_array_equal(np.sort((Y @ directions).ravel()), np.sort(Y.ravel()))
    variances = np.sum((Y @ directions) ** 2, axis=0)
    assert (np.diff(variances) <= 0).all()


def test_a_ridge_at_the_edge_is_warned_of(tokens, caplog):
    known = tokens.states[0].astype(np.float64) @ np.random.default_rng(0).normal(size=(24, 24)) / 5
    logits = (known @ tokens.head.T.astype(np.float64))[90:]
    normaliser = np.log(np.exp(logits).sum(axis=1)).astype(np.float32)
    with caplog.at_level(logging.WARNING, "layerwave"):
        found = predicted_acceptance(
            calibration_with(replace(tokens, normed=known.astype(np.float32), log_normaliser=normaliser)), [(0,), (1,)]
        )
    assert found.value[0] > 0.9  # no noise: the smaller λ the better
    assert "λ of 1 sets" in caplog.text
    assert "between 1e-05 and 1000: " in caplog.text
    assert "layers [0]" in caplog.text


@pytest.mark.parametrize(
    ("sets", "match"),
    [
        ([(1, 4)], "layer 4 is out of range"),
        ([(1,), (2, 2)], "layer 2 is repeated"),
        ([()], "layer set is empty"),
        (iter([1, 2, 3]), r"sets is \[1, 2, 3\], but each set has to be a list of layers: write \[\[1, 2, 3\]\]"),
    ],
)
def test_sets_that_are_none(calibration, sets, match):
    with pytest.raises(LayerwaveError, match=match):
        predicted_acceptance(calibration, sets)


def test_unknown_weighting(calibration):
    with pytest.raises(LayerwaveError, match="unknown weighting 'norm': choose raw or trace"):
        predicted_acceptance(calibration, SIZES, weighting="norm")
