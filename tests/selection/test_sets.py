"""Enumeration, order and checks of layer sets."""

import math
from itertools import combinations

import numpy as np
import pytest

from layerwave.errors import LayerwaveError
from layerwave.selection.sets import all_sets, check_count, check_layers, check_size, eligible, ranking, sets_at


@pytest.mark.parametrize(("num_layers", "size"), [(1, 1), (6, 1), (6, 3), (6, 6), (9, 4)])
def test_all_sets_are_the_combinations_in_order(num_layers, size):
    blocks = list(all_sets(num_layers, size, block=7))
    assert all(len(block) <= 7 for block in blocks)
    assert [tuple(row) for row in np.concatenate(blocks).tolist()] == list(combinations(range(num_layers), size))


def test_sets_at_far_places():
    assert sets_at(np.array([82159]), 80, 3).tolist() == [[77, 78, 79]]
    # C(66, 33) is below 2^63 and C(67, 33) above it.
    assert sets_at(np.array([math.comb(66, 33) - 1]), 66, 33).tolist() == [[*range(33, 66)]]
    for num_layers, size in ((67, 33), (200, 100)):
        with pytest.raises(LayerwaveError, match="smaller size"):
            sets_at(np.array([0]), num_layers, size)


def test_ranking_breaks_ties_by_layers_even_below_rounding():
    sets = np.array([[2, 3], [0, 5], [0, 4], [1, 2]])
    assert ranking(np.array([1.0, 1.0 + 1e-15, 1.0, 2.0]), sets).tolist() == [3, 2, 1, 0]
    assert ranking(np.array([1.0, 1.0 + 1e-9, 1.0, 2.0]), sets).tolist() == [3, 1, 2, 0]


def test_scores_tie_up_to_a_trillionth():
    """Each with the next greater one, so that a chain of ties is one tier."""
    sets = np.array([[0], [1]])
    assert ranking(np.array([0.0, 1e-12]), sets).tolist() == [0, 1]
    assert ranking(np.array([0.0, 1.01e-12]), sets).tolist() == [1, 0]
    chain = np.array([0.0, 0.9e-12, 1.8e-12, 3e-12])
    assert ranking(chain, np.array([[0], [2], [1], [3]])).tolist() == [3, 0, 2, 1]


def test_only_single_layers_obey_the_rule_of_the_middle():
    assert eligible(np.arange(7)[:, None], 7).tolist() == [False] * 4 + [True] * 3
    assert eligible(np.array([[0, 1]]), 7).tolist() == [True]
    with pytest.raises(LayerwaveError, match="after the middle"):
        eligible(np.array([[0], [1]]), 2)


def test_checks():
    assert check_layers([5, np.int64(2)], 6) == (2, 5)
    for layers in ([1.5, 2], ["a"], [0, True]):
        with pytest.raises(LayerwaveError, match="integer"):
            check_layers(layers, 6)
    with pytest.raises(LayerwaveError, match="empty"):
        check_layers([], 6)
    for layer in (-1, 6):
        with pytest.raises(LayerwaveError, match=rf"layer {layer} is out of range: .* 0 … 5"):
            check_layers([0, layer], 6)
    assert [check_size(size, 6) for size in (1, 6)] == [1, 6]
    for size in (0, 7, -1):
        with pytest.raises(LayerwaveError, match="number of layers, 6"):
            check_size(size, 6)


def test_counts_are_whole_numbers():
    assert [check_count("beam", count) for count in (1, np.int64(3))] == [1, 3]
    with pytest.raises(LayerwaveError, match="beam is 0: it must be at least 1"):
        check_count("beam", 0)
    assert type(check_size(np.int64(3), 5)) is int
    for value in (2.0, "2", None, True):
        with pytest.raises(LayerwaveError, match=r"beam is .* whole number"):
            check_count("beam", value)
