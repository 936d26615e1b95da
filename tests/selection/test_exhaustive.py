"""Ranks among all sets of a size."""

from itertools import combinations

import literal
import numpy as np
import problems
import pytest

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection import exhaustive, rank_among_all
from layerwave.selection import sets as sets_module


@pytest.fixture(scope="module")
def states():
    return problems.states(5, 8)


def test_ranks_are_those_of_the_sorted_literal_scores(states):
    calibration = Calibration.from_states(states)
    scored = {s: literal.entropy(states.astype(np.float64), s) for s in combinations(range(8), 3)}
    values = sorted(scored.values(), reverse=True)
    given = [(7, 0, 3), (1, 2, 4), exhaustive(calibration, 3).layers]
    ranks = rank_among_all(calibration, given)
    for layers, rank in zip(given, ranks, strict=True):
        score = scored[tuple(sorted(layers))]
        assert rank.layers == tuple(sorted(layers))
        assert rank.total == 56
        assert rank.rank == 1 + sum(value > score + 1e-12 for value in values)
        assert rank.percentile == pytest.approx(100 * (56 - rank.rank) / 55)
        assert rank.gap == pytest.approx(values[0] - score, abs=1e-9)
    assert (ranks[-1].rank, ranks[-1].percentile, ranks[-1].gap) == (1, 100.0, 0.0)


def test_copies_share_a_rank():
    calibration = Calibration.from_states(np.repeat(problems.states(0, 1), 5, axis=0))
    assert {r.rank for r in rank_among_all(calibration, [(0, 1), (3, 4)])} == {1}


def test_the_one_set_of_all_layers_is_the_best(states):
    (rank,) = rank_among_all(Calibration.from_states(states), [range(8)])
    assert (rank.rank, rank.total, rank.percentile, rank.gap) == (1, 1, 100.0, 0.0)


def test_of_two_sets_one_is_last():
    calibration = Calibration.from_states(problems.states(0, 2))
    ranks = rank_among_all(calibration, [[0], [1]], criterion=lambda sets: sets[:, 0].astype(float))
    assert [(rank.rank, rank.percentile, rank.gap) for rank in ranks] == [(2, 0.0, 1.0), (1, 100.0, 0.0)]


def test_the_last_of_all_sets_has_none_below_it():
    """Scores are powers of two, so that ranks are known: the pair (0, 1) is the last of ten."""
    calibration = Calibration.from_states(problems.states(0, 5))
    last, middle = rank_among_all(calibration, [(0, 1), (0, 3)], criterion=lambda sets: (2.0**sets).sum(axis=1))
    assert (last.rank, last.percentile, last.score, last.gap) == (10, 0.0, 3.0, 21.0)
    assert (middle.rank, middle.percentile, middle.gap) == (7, pytest.approx(300 / 9), 15.0)


def test_blocks_do_not_change_the_result(states, monkeypatch):
    calibration = Calibration.from_states(states)
    whole, ranks = exhaustive(calibration, 3), rank_among_all(calibration, [(0, 1, 2)])
    defaults = (5,)
    monkeypatch.setattr(sets_module.all_sets, "__defaults__", defaults)
    assert exhaustive(calibration, 3) == whole
    assert rank_among_all(calibration, [(0, 1, 2)]) == ranks


@pytest.mark.parametrize("sets", [[], [(0, 1), (0, 1, 2)], [(0, 8)], [(2, 2)]])
def test_faults(states, sets):
    with pytest.raises(LayerwaveError):
        rank_among_all(Calibration.from_states(states), sets)
