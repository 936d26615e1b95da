"""Which sets are compared, and what every criterion says of them, on states whose truth is planted."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from layerwave.errors import LayerwaveError
from layerwave.selection import CRITERIA, SelectionSettings, elsi, predicted_acceptance, select
from layerwave.validation import Candidates, CandidateSettings, candidates
from layerwave.validation.candidates import draw_strata, stratified_sets
from tests.pools import calibration_of
from tests.token_samples import planted_tokens

N, B, D = 8, 8, 12
PLANTED = (2, 5)
SETTINGS = CandidateSettings(sizes=(1, 2, 3), random=5, acceptance_sets=3)


def make_calibration(num_layers: int = N):
    pools = np.random.default_rng(0).normal(size=(4, num_layers, B, D))
    pools *= np.geomspace(1, 5, num_layers)[:, None, None]
    pools[0, :, 0] *= 4  # the sink that pool 1 lacks
    pools[2] = np.cumsum(pools[2], axis=0)
    return replace(calibration_of(pools), tokens=planted_tokens(num_layers, PLANTED))


@pytest.fixture(scope="module")
def calibration():
    return make_calibration()


@pytest.fixture(scope="module")
def found(calibration) -> Candidates:
    return candidates(calibration, SETTINGS)


def named(found: Candidates, name: str) -> set:
    return {candidate.layers for candidate in found.sets if name in candidate.names}


def literal_entropy(states, layers, alpha=1.0):
    joined = np.concatenate([states[layer] for layer in layers], axis=1).astype(np.float64)
    values = np.linalg.svd(joined, compute_uv=False)
    p = values**2 / np.sum(values**2)
    if alpha == 1:
        return -np.sum(p * np.log(p))
    return -np.log(p.max()) if alpha == np.inf else np.log(np.sum(p**alpha)) / (1 - alpha)


def test_every_method_has_its_choice_of_every_size(calibration, found):
    for size in SETTINGS.sizes:
        for method in ("elsi", "elsi_c", "exhaustive", "low_entropy", "uniform"):
            assert select(calibration, SelectionSettings(method, size)).layers in named(found, method)
        assert elsi(calibration, size, criterion="acceptance").layers in named(found, "acceptance")
    assert named(found, "eagle2") == {(7,)}
    assert named(found, "eagle3") == {(2, 4, 5)}
    assert named(found, "eagle3_engine") == {(1, 3, 4)}
    assert found.notes == ()


def test_the_beam_of_predicted_acceptance_adds_its_best_sets(calibration, found):
    for size in (2, 3):
        every = list(combinations(range(N), size))
        order = np.argsort(-predicted_acceptance(calibration, every).value)
        best = {every[i] for i in order[: SETTINGS.acceptance_sets]}
        ours = named(found, "acceptance") | named(found, "acceptance_beam")
        assert {layers for layers in ours if len(layers) == size} == best  # the beam is wide enough for all of them
    assert PLANTED in named(found, "acceptance")


def test_equal_sets_stand_once_with_all_names(found):
    layers = [candidate.layers for candidate in found.sets]
    assert len(set(layers)) == len(layers)
    assert [len(one) for one in layers] == sorted(map(len, layers))
    (best,) = [one for one in found.sets if one.layers in named(found, "exhaustive") and one.size == 2]
    assert {"elsi", "exhaustive"} <= set(best.names)
    assert all(len(set(candidate.names)) == len(candidate.names) for candidate in found.sets)


def test_random_sets_cover_the_range_of_the_entropy(calibration, found):
    drawn = [candidate for candidate in found.sets if "random" in candidate.names]
    assert len(drawn) == SETTINGS.random
    assert all(candidate.size == 3 and candidate.names == ("random",) for candidate in drawn)
    again = stratified_sets(calibration, 3, 5, 0, without=named(found, "elsi"))
    assert again == stratified_sets(calibration, 3, 5, 0, without=named(found, "elsi"))
    assert again != stratified_sets(calibration, 3, 5, 1, without=named(found, "elsi"))
    assert not named(found, "elsi") & set(again)
    with pytest.raises(LayerwaveError, match="57 random sets of 3 layers asked for, but only 56 of 56 are not chosen"):
        stratified_sets(calibration, 3, 57, 0)
    assert len(set(stratified_sets(calibration, 3, 56, 0))) == 56


def test_strata_of_equal_width_have_one_set_each():
    scores = np.concatenate([np.full(200, 0.05), [0.3, 0.31, 0.95, 1.0]])  # nearly all in the lowest of five strata
    for seed in range(20):
        drawn = draw_strata(scores, 5, np.random.default_rng(seed))
        assert len(set(drawn.tolist())) == 5
        assert (np.diff(scores[drawn]) >= 0).all()
        strata = np.minimum((scores[drawn] - 0.05) / 0.19, 4).astype(int)
        assert {0, 1, 4} == set(strata)  # the others have no set; their place is filled
    tops = {scores[draw_strata(scores, 5, np.random.default_rng(seed))].max() for seed in range(20)}
    assert tops == {0.95, 1.0}
    alike = draw_strata(np.ones(4), 3, np.random.default_rng(0))
    assert len(set(alike.tolist())) == 3


def test_scores_are_those_of_the_criteria_and_of_literal_entropies(calibration, found):
    trace = calibration.pool() / np.linalg.norm(calibration.pool(), axis=(1, 2), keepdims=True)
    for candidate in found.sets:
        scores, layers = candidate.scores, candidate.layers
        assert set(CRITERIA) <= scores.keys()
        literal = {
            "entropy": literal_entropy(calibration.pool(), layers),
            "entropy_trace": literal_entropy(trace, layers),
            "entropy_alpha_2": literal_entropy(calibration.pool(), layers, 2.0),
            "entropy_alpha_inf": literal_entropy(calibration.pool(), layers, np.inf),
            "entropy_sinks_dropped": literal_entropy(calibration.pool(sinks="drop"), layers),
            "entropy_no_filter": literal_entropy(calibration.pool(filtered=False), layers),
        }
        assert scores.keys() == set(CRITERIA) | literal.keys()
        for name, value in literal.items():
            assert scores[name] == pytest.approx(value, abs=1e-5), (layers, name)
        assert scores["acceptance"] == predicted_acceptance(calibration, [layers]).value[0]
        assert candidate.informativeness + candidate.diversity == pytest.approx(scores["entropy"], abs=1e-9)


def test_the_other_reading_of_sinks_and_no_filter_twice(calibration):
    dropped = replace(calibration, settings=replace(calibration.settings, sinks="drop", rho=1.0))
    (one,) = candidates(dropped, CandidateSettings(layers=((3, 0),))).sets
    assert one.layers == (0, 3)
    assert one.names == ("given",)
    assert "entropy_no_filter" not in one.scores
    assert one.scores["entropy_sinks_kept"] == pytest.approx(literal_entropy(calibration.pool(), (0, 3)), abs=1e-5)


def test_given_sets_in_place_of_the_others_or_beside_them(calibration, found):
    given = ((0, 6, 7), (2, 4, 5))
    alone = candidates(calibration, replace(SETTINGS, layers=given))
    assert [candidate.layers for candidate in alone.sets] == list(given)
    beside = candidates(calibration, replace(SETTINGS, layers=given, beside=True))
    assert named(beside, "given") == set(given)
    assert named(beside, "eagle3") == {(2, 4, 5)}
    assert named(beside, "elsi") == named(found, "elsi")


def test_what_does_not_fit_the_target_is_said():
    shallow = make_calibration(6)
    found = candidates(shallow, CandidateSettings(sizes=(3,), random=0))
    assert not named(found, "eagle3") | named(found, "eagle3_engine")
    assert [note.split(" = ")[0] for note in found.notes] == ["the rule eagle3", "the rule eagle3_engine"]
    without = candidates(replace(shallow, tokens=None), CandidateSettings(sizes=(2,), random=0))
    assert "acceptance" not in without.sets[0].scores
    assert [note[:40] for note in without.notes] == [
        "no sets of 2 layers by predicted accepta",
        "no scores by acceptance: this calibratio",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": (2, 2)}, r"sizes are \[2, 2\]"),
        ({"sizes": ()}, r"sizes are \[\]"),
        ({"random": -1}, "random is -1"),
        ({"acceptance_sets": 0}, "acceptance_sets is 0"),
        ({"sizes": (9,)}, "the size of the layer set is 9"),
        ({"layers": ((1, 8),)}, "layer 8 is out of range"),
        ({"layers": ((1, 1),)}, "layer 1 is repeated"),
    ],
)
def test_settings_that_are_refused(calibration, settings, message):
    with pytest.raises(LayerwaveError, match=message):
        candidates(calibration, CandidateSettings(**settings))
