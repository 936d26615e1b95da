"""Who leaves a cascade: against literal decisions, with literal errors."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from layerwave.errors import LayerwaveError
from layerwave.selection import predicted_acceptance
from layerwave.validation import CascadeSettings, study
from layerwave.validation.cascade import cost, halve, shortlist, staying
from layerwave.validation.held_out import HeldOut
from tests.pools import calibration_of
from tests.token_samples import planted_tokens

SETS = [(0,), (3,), (0, 1), (0, 2), (2, 3), (1, 2), (1, 2, 3), (0, 1, 2)]


def literal_halving(overlap, asked, sets, finalists):
    """The sets that stay, by loops: value, paired error of a ratio by its linearisation, two errors."""
    rows, total = len(asked), sum(asked)
    values = [sum(row) / total for row in overlap]
    order = sorted(range(len(sets)), key=lambda i: (-values[i], len(sets[i]), sets[i]))
    stay = set()
    for place, i in enumerate(order):
        gaps = [a - b for a, b in zip(overlap[order[0]], overlap[i], strict=True)]
        mean = sum(gaps) / total
        error = sqrt(sum((g - mean * n) ** 2 for g, n in zip(gaps, asked, strict=True)) * rows / (rows - 1)) / total
        if place < max((len(sets) + 1) // 2, finalists) or mean <= 2 * error:
            stay.add(sets[i])
    return stay


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("finalists", [1, 6])
def test_halving_is_the_literal_one(seed, finalists):
    rng = np.random.default_rng(seed)
    asked = rng.integers(1, 40, 25)
    hard = rng.uniform(0.2, 0.6, 25)  # what a row has in common for all sets cancels in pairs
    quality = rng.normal(0, 0.02, len(SETS))
    overlap = asked * (hard + quality[:, None] + rng.normal(0, 0.03, (len(SETS), 25)))
    stage = halve(HeldOut(overlap, asked), SETS, 7, finalists)
    assert set(staying(stage)) == literal_halving(overlap.tolist(), asked.tolist(), SETS, finalists)
    assert (stage.measure, stage.steps) == ("held-out acceptance", 7)
    assert [found.value for found in stage.standings] == sorted((overlap.sum(1) / asked.sum()).tolist(), reverse=True)
    assert stage.standings[0].behind == 0
    for found in stage.standings:
        assert found.behind == pytest.approx(found.value - stage.standings[0].value, abs=1e-12)


def test_all_three_fates_are_said():
    asked = np.full(20, 10)
    steady = np.arange(20) % 2 * 0.02  # differences have this much noise
    overlap = asked * np.stack([np.full(20, 0.5), np.full(20, 0.49), 0.487 + steady - 0.01, 0.3 + steady])
    stage = halve(HeldOut(overlap, asked), [(0,), (1,), (2,), (3,)], 5, 1)
    assert [found.stays for found in stage.standings] == [True, True, False, False]
    noisy = overlap.copy()
    noisy[2] += 10 * np.where(np.arange(20) % 2, 0.2, -0.2)
    stage = halve(HeldOut(noisy, asked), [(0,), (1,), (2,), (3,)], 5, 1)
    fates = {found.layers: (found.stays, found.why.split(", ")[1]) for found in stage.standings}
    assert fates == {
        (0,): (True, "2 stay"),
        (1,): (True, "2 stay"),
        (2,): (True, "not told apart from the best"),
        (3,): (False, "told apart from the best"),
    }


def test_one_row_tells_nothing_apart():
    stage = halve(HeldOut(np.array([[5.0], [4.0], [1.0]]), np.array([10])), [(0,), (1,), (2,)], 5, 1)
    assert all(found.stays and found.standard_error is None for found in stage.standings)


def test_ties_go_to_fewer_and_lower_layers():
    overlap = np.ones((4, 3))
    stage = halve(HeldOut(overlap, np.full(3, 2)), [(1, 2), (0, 3), (5,), (4,)], 5, 1)
    assert [found.layers for found in stage.standings] == [(4,), (5,), (0, 3), (1, 2)]


# The shortlist


@pytest.fixture(scope="module")
def calibration():
    pools = np.random.default_rng(0).normal(size=(4, 5, 8, 12))
    return replace(calibration_of(pools), tokens=planted_tokens(5, (1, 3)))


@pytest.fixture(scope="module")
def predicted(calibration, tmp_path_factory):
    path = tmp_path_factory.mktemp("predicted") / "predicted.jsonl"
    return study.predict_all(calibration, (1, 2), [(0, 1, 2)], path)


def test_every_set_of_the_sizes_is_scored(calibration, predicted):
    assert len(predicted.sets) == len(set(predicted.sets)) == 5 + 10 + 1
    again = predicted_acceptance(calibration, predicted.sets)
    assert predicted.value.tolist() == again.value.tolist()
    assert predicted.standard_error.tolist() == again.standard_error.tolist()
    assert predicted.difference(3, 9) == again.difference(3, 9)


def test_scoring_goes_on_where_it_was(calibration, predicted, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "CHUNK", 5)
    path = tmp_path / "predicted.jsonl"

    def stop(done, total):
        assert total == 16
        if done >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.predict_all(calibration, (1, 2), [(0, 1, 2)], path, stop)
    calls = []
    found = study.predict_all(calibration, (1, 2), [(0, 1, 2)], path, lambda *call: calls.append(call))
    assert calls == [(15, 16), (16, 16)]
    assert found.by_sample.tolist() == predicted.by_sample.tolist()
    with pytest.raises(LayerwaveError, match=r"predicted\.jsonl is of a run with other sets"):
        study.predict_all(calibration, (1,), [], path)


def test_sizes_share_the_shortlist(predicted):
    stage = shortlist(predicted, 5, [(0, 1, 2), (0,)])
    assert [found.value for found in stage.standings] == sorted(predicted.value.tolist(), reverse=True)
    values = dict(zip(predicted.sets, predicted.value.tolist(), strict=True))

    def best(size, count):
        return set(sorted((s for s in values if len(s) == size), key=lambda s: -values[s])[:count])

    assert set(staying(stage)) == best(1, 1) | best(2, 2) | {(0, 1, 2)} | {(0,)}
    assert (1, 3) in staying(stage)
    why = {found.layers: found.why for found in stage.standings}
    assert why[0, 1, 2] == "place 1 of 1 of its size, 2 stay"
    assert why[0,].endswith("1 stay; given")
    assert staying(stage) == sorted(staying(stage), key=lambda layers: (len(layers), layers))


def test_rungs_double_to_the_full_training():
    assert CascadeSettings(16, 4).rungs == (0.25, 0.5)
    assert CascadeSettings(16, 3).rungs == (0.125, 0.25, 0.5)
    assert CascadeSettings(4, 4).rungs == ()
    for sizes in ((3, 4), (3, 0)):
        with pytest.raises(LayerwaveError, match=f"finalists are {sizes[1]} of a shortlist of 3"):
            CascadeSettings(*sizes)


def test_the_cost_is_counted_in_draft_steps(predicted):
    first = shortlist(predicted, 8)
    sets = staying(first)
    rng = np.random.default_rng(0)
    second = halve(HeldOut(rng.uniform(size=(len(sets), 30)), np.full(30, 4)), sets, 50, 4)
    left = len(staying(second))
    assert cost([first, second], left, 100, 2) == {
        "draft-steps of the cascade": 50 * len(sets) + left * 100 * 2,
        "draft-steps of full runs of the shortlist": len(sets) * 100 * 2,
        "draft-steps of full runs of all sets": 16 * 100 * 2,
    }
