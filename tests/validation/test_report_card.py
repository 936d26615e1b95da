"""The report card: the paper's two tables, planted answers, a literal loop, and every case without a number."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr

from layerwave.errors import LayerwaveError
from layerwave.validation.accepted import Accepted, accepted_lengths, as_measured, average, resample
from layerwave.validation.correlations import resampled_sets
from layerwave.validation.report_card import TRAINED, report_card, report_cards, scores_of
from tests.validations import SETS, planted_validation

RESAMPLES = 400

# arXiv 2610.12939, Tables 1 and 2: EAGLE2, ELSI of one layer; ELSI and ELSI-C of two; EAGLE3, ELSI and ELSI-C of three.
SIZES = np.array([1, 1, 2, 2, 3, 3, 3])
ENTROPY = {
    "Qwen3-4B": [0.044, 0.469, 0.625, 0.588, 0.441, 0.627, 0.593],
    "Llama-3.1-8B": [0.530, 0.718, 0.824, 0.797, 0.687, 0.910, 0.889],
}
TAU = {  # (nodes, temperature)
    "Qwen3-4B": {
        (30, 0.0): [4.00, 4.24, 4.28, 4.26, 4.20, 4.29, 4.24],
        (30, 1.0): [3.86, 4.06, 4.11, 4.09, 4.02, 4.11, 4.08],
        (60, 0.0): [4.28, 4.50, 4.55, 4.54, 4.48, 4.57, 4.52],
        (60, 1.0): [4.12, 4.31, 4.36, 4.36, 4.30, 4.37, 4.33],
    },
    "Llama-3.1-8B": {
        (30, 0.0): [4.40, 4.58, 4.58, 4.53, 4.64, 4.59, 4.52],
        (30, 1.0): [3.64, 3.82, 3.81, 3.81, 3.88, 3.86, 3.77],
        (60, 0.0): [4.66, 4.84, 4.83, 4.79, 4.89, 4.84, 4.78],
        (60, 1.0): [3.95, 4.06, 4.06, 4.06, 4.12, 4.06, 4.05],
    },
}


def published(taus: list[float], columns=("QA",)) -> Accepted:
    """τ of one draft a set, with nothing that could be resampled: two decimals are tokens of a hundred rounds."""
    emitted = np.round(100 * np.array(taus)).astype(np.int64)[None, :, None].repeat(len(columns), axis=2)
    return Accepted(
        30, 0.0, emitted, np.full_like(emitted, 100), np.ones(emitted.shape), np.ones((1, len(columns))), columns, 0
    )


@pytest.fixture(scope="module")
def validation():
    return planted_validation()


@pytest.fixture(scope="module")
def card(validation):
    return report_cards(validation, resamples=RESAMPLES)[0]


@pytest.mark.parametrize(
    ("model", "low", "high"), [("Qwen3-4B", 0.93, 0.97), ("Llama-3.1-8B", 0.0, 0.2)], ids=["Qwen3-4B", "Llama-3.1-8B"]
)
def test_the_papers_tables(model, low, high):
    """Of its two models the entropy ranks the seven sets of one almost perfectly, and those of the other hardly."""
    for taus in TAU[model].values():
        card = report_card(published(taus), {"entropy": np.array(ENTROPY[model])}, SIZES, resamples=RESAMPLES)
        found = card["all sets"]["entropy"]
        assert found.spearman.value == pytest.approx(spearmanr(ENTROPY[model], taus).statistic)
        assert found.kendall.value == pytest.approx(kendalltau(ENTROPY[model], taus).statistic)
        assert low < found.spearman.value < high
        assert found.spearman.over_measurements is None
        assert "no other measurements" in found.spearman.missing
        assert found.regret.value is None
        assert found.regret.measured == pytest.approx(max(taus) - taus[int(np.argmax(ENTROPY[model]))])
    wide = found.spearman.over_sets  # T = 1, 60 nodes
    assert (wide[0] < 0) == (model == "Llama-3.1-8B")


def test_a_criterion_that_knows_the_truth(card):
    everything, within = card["all sets"], card["within sizes"]
    assert everything["acceptance"].spearman.value > 0.97
    assert everything["acceptance"].verdict == "better"
    assert everything["backwards"].spearman.value < -0.97
    assert everything["backwards"].verdict == "worse"
    assert within["acceptance"].spearman.value > 0.9
    assert everything.ceiling > 0.95
    assert everything["backwards"].regret.value > 0.6
    assert everything["acceptance"].regret.value == pytest.approx(0, abs=0.05)
    assert 0.2 < everything.chance.value < 0.6
    assert card["3 layers"].members == tuple(i for i, layers in enumerate(SETS) if len(layers) == 3)
    assert len(card.tau) == len(SETS)
    assert all(one.low < one.value < one.high for one in (*card.tau, *card.apart))
    assert sum(one.value for one in card.apart) == pytest.approx(0, abs=1e-12)


def test_a_literal_loop(validation, card):
    """Every number of one group, resample by resample, with scipy's coefficients."""
    measured = accepted_lengths(validation.evaluations)[0]
    members = np.array(card["3 layers"].members)
    scores = {name: values[members] for name, values in scores_of(validation).items()}
    taus = average(measured, as_measured(measured))[0]
    drawn = average(measured, resample(measured, RESAMPLES, 0))[:, members]
    others = resampled_sets(np.array([len(layers) for layers in SETS]), RESAMPLES, 0)[:, members]
    local = {place: i for i, place in enumerate(members.tolist())}
    for literal, field in ((spearmanr, "spearman"), (kendalltau, "kendall")):
        for name in ("entropy", "acceptance"):
            x, found = scores[name], getattr(card["3 layers"][name], field)
            value = literal(x, taus[members]).statistic
            assert found.value == pytest.approx(value)
            here = np.array([literal(x, row).statistic for row in drawn])
            bounds = np.clip(value + np.quantile(here, (0.025, 0.975)) - here.mean(), -1, 1)
            assert found.over_measurements == pytest.approx(bounds, abs=1e-9)
            elsewhere = [
                literal(x[[local[i] for i in row]], taus[row]).statistic for row in others if len(set(row)) > 1
            ]
            bounds = np.quantile(elsewhere, (0.025, 0.975))
            if np.ptp(bounds) < 1e-9:
                assert found.over_sets is None
            else:
                assert found.over_sets == pytest.approx(bounds, abs=1e-9)
    pairs = [[spearmanr(scores[name], row).statistic for row in drawn] for name in ("acceptance", "entropy")]
    apart = np.subtract(*pairs)
    found = card["3 layers"]["acceptance"].beside
    value = np.subtract(*(spearmanr(scores[n], taus[members]).statistic for n in ("acceptance", "entropy")))
    assert found.value == pytest.approx(value)
    assert found.over_measurements == pytest.approx(value + np.quantile(apart, (0.025, 0.975)) - apart.mean(), abs=1e-9)


def test_a_criterion_of_equal_scores_has_no_correlation_and_a_choice_by_lot(card):
    constant = card["1 layer"]["dpp"]
    assert constant.spearman.value is None
    assert constant.spearman.missing == "all sets score alike"
    assert constant.verdict == ""
    assert constant.choice == card["1 layer"].members
    assert constant.regret == card["1 layer"].chance


def test_what_orders_as_the_entropy_does_is_not_compared(card):
    same = card["all sets"]["effective_rank"]
    assert same.spearman.value == card["all sets"]["entropy"].spearman.value
    assert (same.beside.value, same.beside.missing) == (None, "both order the sets alike")
    assert card["all sets"]["entropy"].beside.missing == "the reference"


def test_few_sets():
    """Two of a size have no correlation, four say nothing of others; perfect orders have no interval over sets."""
    scores = {"entropy": np.array([1.0, 2, 1, 2, 3, 4]), "other": np.array([2.0, 1, 4, 3, 2, 1])}
    taus = [2.0, 2.1, 2.0, 2.2, 2.3, 2.5]
    card = report_card(published(taus, ("QA", "QA")), scores, np.array([1, 1, 2, 2, 2, 2]), resamples=RESAMPLES)
    two, four = card["1 layer"], card["2 layers"]
    assert (two["entropy"].spearman.value, two["entropy"].spearman.missing) == (None, "fewer than 3 sets")
    assert two.ceiling is None
    assert two["other"].regret.value == pytest.approx(0.1)
    assert four["entropy"].spearman.value == 1
    assert four["entropy"].spearman.over_sets is None
    assert "4 sets say too little of other sets" in four["entropy"].spearman.missing
    assert four["other"].beside.value == -2
    assert four["other"].verdict == "worse on these sets"
    within = card["within sizes"]["entropy"].spearman
    assert within.value == pytest.approx(1)
    assert "perfect orders" in within.missing


def test_a_single_set_and_equal_accepted_lengths():
    card = report_card(published([2.0]), {"entropy": np.array([1.0])}, np.array([3]), resamples=RESAMPLES)
    (group,) = card.groups
    assert group.name == "all sets"
    assert group["entropy"].spearman.missing == "fewer than 3 sets"
    assert group["entropy"].regret.measured == 0
    level = report_card(published([2.0] * 4), {"entropy": np.arange(4.0)}, np.array([3] * 4), resamples=RESAMPLES)
    assert level["all sets"]["entropy"].spearman.missing == "all sets have the same τ"


def test_one_seed_says_so(validation):
    alone = report_cards(planted_validation(seeds=1), resamples=RESAMPLES)[0]
    assert any("one seed" in note for note in alone.notes)
    found = alone["all sets"]["acceptance"].spearman
    assert found.over_measurements[0] < found.over_measurements[1]


def test_no_nan_leaks(validation, card):
    text = json.dumps([asdict(card), asdict(report_cards(planted_validation(seeds=1), resamples=60)[1])])
    assert "NaN" not in text
    assert "Infinity" not in text
    taus = [2.0, 2.1, 2.0]
    for columns in (("QA",), ("QA", "RAG"), ("QA", "QA", "RAG")):
        small = report_card(
            published(taus, columns), {"entropy": np.zeros(3), "x": np.arange(3.0)}, np.ones(3, int), resamples=60
        )
        assert "NaN" not in json.dumps(asdict(small))


def test_the_winner_s_curse_is_not_in_the_regret():
    """Of sets that are all alike, the best as measured seems better than the choice; on held-out halves it is not."""
    measured, held_out = [], []
    for key in range(40):
        rng = np.random.default_rng(key)
        rounds = np.full((2, 8, 12), 40)
        emitted = rounds + rng.poisson(1.5 * 40, size=rounds.shape)
        accepted = Accepted(30, 0.0, emitted, rounds, np.ones(rounds.shape), np.ones((2, 12)), ("QA",) * 12, 0)
        card = report_card(accepted, {"entropy": rng.permutation(8).astype(float)}, np.full(8, 2), resamples=50)
        found = card["all sets"]["entropy"].regret
        measured.append(found.measured)
        held_out.append(found.value)
    errors = [np.std(values) / np.sqrt(len(values)) for values in (measured, held_out)]
    assert np.mean(measured) > 4 * errors[0]
    assert abs(np.mean(held_out)) < 3 * errors[1]


def test_the_trained_drafts_are_beside_the_criteria(validation, card):
    assert list(scores_of(validation))[:5] == list(validation.candidates[0].scores)
    assert [one.criterion for one in card["all sets"].criteria] == list(scores_of(validation))
    np.testing.assert_allclose(scores_of(validation)[TRAINED], np.mean(validation.held_out, axis=0))


def test_the_same_seed_gives_the_same_card(validation, card):
    assert report_cards(validation, resamples=RESAMPLES)[0] == card


def test_a_common_factor_of_the_scores_changes_nothing(validation, card):
    scores = {name: 1e3 * values for name, values in scores_of(validation).items()}
    sizes = np.array([len(layers) for layers in SETS])
    assert report_card(accepted_lengths(validation.evaluations)[0], scores, sizes, resamples=RESAMPLES) == card


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"acceptance": np.arange(3.0)}, "add entropy"),
        ({"entropy": np.array([1.0, np.nan, 2.0])}, "scores by entropy are .* expected finite"),
    ],
)
def test_faults(scores, message):
    with pytest.raises(LayerwaveError, match=message):
        report_card(published([2.0, 2.1, 2.2]), scores, np.array([1, 2, 3]), resamples=10)
