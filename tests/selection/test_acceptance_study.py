"""The study of predicted acceptance on planted layers, and its errors against literal ones."""

from dataclasses import replace

import numpy as np
import pytest

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection import (
    AcceptanceScores,
    Difference,
    LearningCurve,
    LearningPoint,
    ScoredSet,
    SelectionSettings,
    acceptance_study,
    chooser,
    compare,
    diagnose,
    elsi,
    select,
)
from layerwave.selection.acceptance import predicted_acceptance
from layerwave.selection.acceptance_learning import first_positions, learning_curve
from layerwave.selection.acceptance_scores import named
from layerwave.selection.acceptance_study import sets_to_score
from tests.pools import calibration_of
from tests.token_samples import planted_tokens

N, B, D = 7, 8, 12
PLANTED = (2, 5)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """What the target says next stands in layers 2 and 5; a sink in their blocks hides them from the entropy."""
    states = np.random.default_rng(0).normal(size=(4, N, B, D))
    states[:2, PLANTED, 0] *= 60
    return replace(calibration_of(states), tokens=planted_tokens(N, PLANTED))


@pytest.fixture(scope="module")
def study(calibration):
    return acceptance_study(calibration, beam=4)


def sums_of(calibration, layers):
    """Acceptance of a set in each scoring conversation, and positions there."""
    found = predicted_acceptance(calibration, np.array([layers]))
    return found.by_sample[0], found.counts


# The planted layers


def test_the_planted_layers_are_found(study):
    assert [rung.best.layers for rung in study.ladder[:2]] == [(2,), PLANTED]
    assert max(study.singles, key=lambda s: s.value).layers == (2,)
    assert study.seeds[0] == 2
    assert study.smallest.layers == PLANTED  # a third layer is noise
    assert study.ladder[1].gain.told_apart
    assert study.ladder[1].level == 0
    assert study.ladder[1].frequency == 1.0


def test_the_entropy_is_fooled_by_the_sink_and_the_study_says_so(study, calibration):
    assert not set(study.entropy.layers) & set(PLANTED)
    assert study.entropy.layers == elsi(calibration, len(study.best.layers)).layers
    assert study.behind(study.entropy).told_apart
    assert study.readings["Beside the entropy"].startswith("They conflict")


def test_the_pairs_are_those_of_the_seeds_with_everyone(study, calibration):
    assert study.pairs.shape == (4, N)
    for row, seed in zip(study.pairs, study.seeds, strict=True):
        for layer in range(N):
            if layer == seed:
                assert np.isnan(row[layer])
                continue
            sums, counts = sums_of(calibration, sorted((seed, layer)))
            assert row[layer] == pytest.approx(sums.sum() / counts.sum(), abs=1e-5)


def test_every_set_is_scored_once(calibration):
    reports = []
    scores = AcceptanceScores(calibration, progress=reports.append)
    first = scores(np.array([[0], [2], [0]]))
    assert (reports, len(scores.sets)) == ([2], 2)
    np.testing.assert_array_equal(scores(np.array([[2], [0]])), first[[1, 2]])
    assert scores[[2]].value == first[1]
    assert reports == [2]
    told = []
    acceptance_study(calibration, size=2, beam=3, progress=lambda done, about: told.append((done, about)))
    assert told[-1][0] >= N + 15  # all pairs with one of three seeds
    assert {about for _, about in told} == {sets_to_score(N, 2, 3)}
    assert all(done <= about for done, about in told)


def test_the_beam_is_that_of_the_criterion_by_name(study, calibration):
    by_name = select(calibration, SelectionSettings("elsi", 2, "acceptance", beam=4))
    remembered = elsi(calibration, 2, beam=4, criterion=study.scores)
    assert by_name.layers == remembered.layers == PLANTED
    assert by_name.criterion == remembered.criterion == "acceptance"
    assert by_name.score == pytest.approx(remembered.score, abs=1e-5)
    assert chooser(by_name) == "acceptance"
    assert study.ladder[1].best.layers == by_name.layers


# Errors


def test_the_difference_against_a_literal_one(study, calibration):
    one, other = study.ladder[0].best, study.ladder[1].best
    found = study.scores.difference(one, other)
    (a, counts), (b, _) = sums_of(calibration, one.layers), sums_of(calibration, other.layers)
    assert found.value == pytest.approx(one.value - other.value, abs=1e-6)
    # What each conversation adds to the mean beside its share of the positions, over independent conversations.
    influence = [(x - y - found.value * n) / counts.mean() for x, y, n in zip(a, b, counts, strict=True)]
    assert found.standard_error == pytest.approx(np.std(influence, ddof=1) / np.sqrt(len(counts)), rel=1e-3)
    assert found.standard_error < one.standard_error + other.standard_error


def test_the_paired_error_is_that_of_a_bootstrap(study, calibration):
    one, other = study.ladder[0].best, study.ladder[1].best
    (a, counts), (b, _) = sums_of(calibration, one.layers), sums_of(calibration, other.layers)
    rng = np.random.default_rng(1)
    drawn = rng.integers(len(counts), size=(4000, len(counts)))
    values = ((a - b)[drawn].sum(axis=1)) / counts[drawn].sum(axis=1)
    # A bootstrap divides by S, not by S - 1.
    bootstrap = values.std() * np.sqrt(len(counts) / (len(counts) - 1))
    assert study.scores.difference(one, other).standard_error == pytest.approx(bootstrap, rel=0.08)


def test_a_set_does_not_differ_from_itself(study):
    found = study.scores.difference(study.best, study.best)
    assert (found.value, found.standard_error, found.told_apart) == (0.0, 0.0, False)
    there, back = (
        study.scores.difference(*pair) for pair in ((study.best, study.entropy), (study.entropy, study.best))
    )
    assert there.value == -back.value
    assert there.standard_error == back.standard_error


def test_told_apart_and_level_mean_two_paired_errors(study):
    for rung in study.ladder:
        others = [s for s in study.scores.of_size(len(rung.best.layers)) if s.layers != rung.best.layers]
        apart = [study.scores.difference(other, rung.best) for other in others]
        assert rung.scored == len(others) + 1
        assert rung.level == sum(abs(d.value) <= 2 * d.standard_error for d in apart)


@pytest.mark.parametrize(("value", "apart"), [(0.25, False), (-0.25, False), (0.26, True), (-0.26, True), (0.0, False)])
def test_sets_are_told_apart_by_more_than_two_errors(value, apart):
    assert Difference(value, 0.125).told_apart is apart


@pytest.mark.parametrize(
    ("num_layers", "size", "beam", "sets"),
    [
        (7, 1, 4, 7),
        (7, 2, 1, 7 + 6),  # the seed with every other layer
        (7, 2, 7, 7 + 21),  # all pairs
        (7, 2, 99, 7 + 21),
        (7, 3, 1, 7 + 6 + 5),
        (7, 3, 2, 7 + 12 + 10),
        (7, 3, 7, 7 + 21 + 35),  # all triples
        (4, 4, 4, 4 + 6 + 4 + 1),
    ],
)
def test_how_many_sets_a_beam_search_scores_at_most(num_layers, size, beam, sets):
    assert sets_to_score(num_layers, size, beam) == sets
    scored = set()

    def criterion(found):  # the sums are powers of two: no two sets tie
        scored.update(map(tuple, found.tolist()))
        return (2.0**found).sum(axis=1)

    states = np.random.default_rng(0).normal(size=(num_layers, 4, 3))
    elsi(Calibration.from_states(states), size, beam, num_layers, criterion=criterion)
    assert len(scored) <= sets


def test_resamples_against_a_literal_loop(study, calibration):
    found = study.scores.resampled(1)
    sums = [sums_of(calibration, (layer,))[0] for layer in range(N)]
    counts = sums_of(calibration, (0,))[1]
    rng, samples, wins, held_out = np.random.default_rng(0), len(counts), np.zeros(N), []
    for weights in rng.multinomial(samples, [1 / samples] * samples, size=1000):
        winner = int(np.argmax([weights @ s for s in sums]))
        wins[winner] += 1
        if (out := weights == 0).any():
            held_out.append(sums[winner][out].sum() / counts[out].sum())
    np.testing.assert_allclose([found.frequency[(layer,)] for layer in range(N)], wins / 1000, atol=0.01)
    assert found.held_out == pytest.approx(np.mean(held_out), abs=1e-4)


def test_the_best_of_equals_is_too_good_where_it_was_chosen(calibration):
    noise = replace(calibration, tokens=planted_tokens(20, (0, 1), seed=3))
    scores = AcceptanceScores(replace(noise, tokens=replace(noise.tokens, states=noise.tokens.states[2:])))
    values = scores(np.arange(N)[:, None])  # layers that know nothing of the target
    assert scores.resampled(1).held_out < values.max()


# Learning curve


@pytest.fixture(scope="module")
def curve(study):
    return learning_curve(study.scores, study.followed)


def test_the_learning_curve_is_fitted_on_the_first_positions(study, curve, calibration):
    assert [point.positions for point in curve.points] == [20, 40, 80, 160]
    assert curve.points[-1].sets == study.followed
    tokens = calibration.tokens
    kept = np.r_[:80, 160 : len(tokens.positions)]
    per_position = ("embeddings", "normed", "samples", "positions", "priorities", "sinks")
    half = replace(
        tokens, states=tokens.states[:, kept], **{name: getattr(tokens, name)[kept] for name in per_position}
    )
    for scored in curve.points[2].sets:
        sums, counts = sums_of(replace(calibration, tokens=half), scored.layers)
        assert scored.value == pytest.approx(sums.sum() / counts.sum(), abs=1e-6)
    rising = [point.sets[0].value for point in curve.points]
    assert rising == sorted(rising)


def test_the_curve_compares_with_its_first_set(study, curve):
    assert [scored.layers for scored in study.followed] == [PLANTED, study.entropy.layers]
    for point in curve.points:
        best, entropy = point.sets
        assert point.behind[0].value == 0
        assert point.behind[1].value == pytest.approx(entropy.value - best.value)
    assert "the same at every number of positions from 20 on" in curve.reading


@pytest.mark.parametrize(("value", "order"), [(0.45, "the same"), (0.65, "not the same")])
def test_what_a_curve_says(value, order):
    def point(positions, first, second):
        sets = ScoredSet((2, 5), first, 0.1, 0.5, 1.0), ScoredSet((1,), second, 0.1, 0.5, 1.0)
        return LearningPoint(positions, sets, ())

    curve = LearningCurve((point(500, 0.5, 0.4), point(1000, 0.5, 0.4), point(2000, 0.55, value)), ())
    assert curve.reading == (
        "Fitted on 2,000 positions instead of 1,000, α̂ of layers 2,5 changes by +0.0500; the order of the 2 sets "
        f"followed is {order} at every number of positions from 500 on."
    )


def test_sinks_that_are_dropped_are_not_fitted(calibration):
    sinks = np.zeros_like(calibration.tokens.sinks)
    sinks[[0, 3, 200]] = True
    settings = replace(calibration.settings, sinks="drop")
    scores = AcceptanceScores(replace(calibration, settings=settings, tokens=replace(calibration.tokens, sinks=sinks)))
    assert scores.fitting.sum() == 158
    part = first_positions(scores, 4)
    assert part.positions[:4].tolist() == [1, 2, 4, 5]
    assert len(part.top_tokens) == part.scoring.sum() == 120


def test_points_that_cannot_be_fitted_say_why(calibration):
    few = replace(calibration, tokens=first_positions(AcceptanceScores(calibration), 24))
    scores = AcceptanceScores(few)
    found = learning_curve(scores, [scores[[2]], scores[[5]]])
    assert [point.positions for point in found.points] == [24]
    assert len(found.missing) == 3
    assert all("positions: the token sample has" in why for why in found.missing)
    assert found.reading.startswith("There is none: 3 positions: ")


# Readings, and what cannot be


def test_every_reading_is_sentences(study):
    assert list(study.readings) == [
        "Best set",
        "Smallest good set",
        "Beside the entropy",
        "Stability",
    ]
    for reading in study.readings.values():
        assert reading.endswith(".")
        assert "\n" not in reading
    assert "2,5" in study.readings["Smallest good set"]
    best, rung = study.readings["Best set"], study.ladder[len(study.best.layers) - 1]
    assert best.startswith(f"L{named(study.best)[1:]} score best of {len(study.scores.sets)} sets: ")
    assert f" {rung.scored - 1 - rung.level} of the {rung.scored - 1} other sets of its size are told apart" in best
    held_out = [f"{rung.held_out:.4f} with {size} layer" for size, rung in enumerate(study.ladder, 1)]
    assert f"its best sets have {held_out[0]}, {held_out[1]}s, {held_out[2]}s. " in study.readings["Stability"]
    assert " Only 12 conversations score, so that the errors" in study.readings["Stability"]
    record = study.to_record()
    assert tuple(record["smallest"]["layers"]) == PLANTED
    assert record["readings"] == study.readings
    positions = [record[f"{side}_positions"] for side in ("fitting", "scoring")]
    assert (*positions, record["scoring_conversations"], record["covered"]) == (160, 120, 12, study.scores.covered)
    assert [rung["best"]["layers"] for rung in record["ladder"]] == [rung.best.layers for rung in study.ladder]


def test_sets_in_a_sentence():
    assert [named(ScoredSet(layers, 0.5, 0.1, 0.5, 1.0)) for layers in ((3,), (2, 5))] == ["layer 3", "layers 2,5"]


def test_single_layers_alone_have_no_pairs(calibration):
    found = acceptance_study(calibration, size=1)
    assert np.isnan(found.pairs).all()
    assert found.best.layers == (2,)
    assert len(found.scores.sets) == N + (found.entropy.layers != (2,)) * 0


def test_no_token_sample_is_refused(calibration):
    with pytest.raises(LayerwaveError, match="token sample"):
        acceptance_study(replace(calibration, tokens=None))
    with pytest.raises(LayerwaveError, match="size of the layer set is 9"):
        acceptance_study(calibration, size=9)


# Beside the other methods


def test_the_comparison_shows_acceptance_beside_the_entropy(study, calibration):
    found = compare(calibration, (1, 2), study)
    assert found.chosen("acceptance", 2).layers == PLANTED
    for row in found.rows:
        assert row.acceptance == study.scores[row.selection.layers]
        best = max(study.scores.of_size(len(row.selection.layers)), key=lambda s: s.value)
        assert row.behind == study.scores.difference(row.acceptance, best)
        assert row.behind.value <= 0
    assert found.chosen("elsi", 2) == elsi(calibration, 2)
    searches, any_size = ["acceptance", "exhaustive", "elsi", "elsi_c", "low_entropy"], ["dflash", "uniform"]
    assert [row.name for row in found.rows] == [*searches, "eagle2", *any_size, *searches, *any_size]
    without = compare(calibration, (2,))
    assert {row.acceptance for row in without.rows} == {None}
    assert "acceptance" not in {row.name for row in without.rows}


def test_rules_that_a_shallow_target_does_not_fit_are_said():
    shallow = Calibration.from_states(np.random.default_rng(0).normal(size=(4, 6, 5)))
    found = compare(shallow, (3,))
    assert [row.name for row in found.rows] == ["exhaustive", "elsi", "elsi_c", "low_entropy", "uniform"]
    rules = ("eagle3", "eagle3_engine", "dflash")
    assert all(f"the rule {rule} " in why for rule, why in zip(rules, found.unfit, strict=True))


def test_a_selection_by_acceptance_is_diagnosed_as_far_as_it_goes(study, calibration):
    chosen = elsi(calibration, 2, beam=4, criterion=study.scores)
    found = diagnose(calibration, chosen)
    assert {title for title, _ in found.missing} == {"Stability", "Sensitivity"}
    assert all("acceptance" in why for _, why in found.missing)
    assert "another weighting" in dict(found.missing)["Sensitivity"]
    alone = {gain.layer: gain.score for gain in found.gains.without}
    assert alone == pytest.approx({5: study.singles[2].value, 2: study.singles[5].value}, abs=1e-5)
    assert found.sinks.keep is found.sinks.drop is None
    assert "single positions" in found.sinks.missing
    assert found.sinks.warning
    assert found.overlap.rules[0].place.total == 21
    assert found.decomposition.layers == PLANTED
