"""Fixed rules: the values that the tools' sources give, and shallow targets."""

import pytest

from layerwave.errors import LayerwaveError
from layerwave.selection import baseline, baselines, random_sets, rules


def test_rules_of_the_paper():
    assert baselines(36, 1)["eagle2"] == (35,)
    assert baselines(36, 3)["eagle3"] == (2, 18, 33)
    assert baselines(32, 3)["eagle3"] == (2, 16, 29)
    assert baselines(36, 3)["eagle3_engine"] == (1, 17, 32)
    assert baselines(32, 3)["eagle3_engine"] == (1, 15, 28)
    assert set(baselines(36, 2)) == {"dflash", "uniform"} == set(rules(2))


@pytest.mark.parametrize(
    ("num_layers", "size", "layers"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (36, 3, (1, 17, 33)),
        (36, 1, (18,)),
    ],
)
def test_dflash_rule(num_layers, size, layers):
    assert baseline("dflash", num_layers, size) == layers


def test_uniform_takes_the_middle_of_equal_parts():
    assert baseline("uniform", 36, 3) == (6, 18, 30)
    for num_layers in range(1, 20):
        for size in range(1, num_layers + 1):
            assert len(set(baseline("uniform", num_layers, size))) == size


@pytest.mark.parametrize("name", ["eagle3", "eagle3_engine"])
def test_shallow_targets_are_an_error_and_never_a_shorter_set(name):
    assert len(baseline(name, 7)) == 3
    for num_layers in (3, 4, 5, 6):
        with pytest.raises(LayerwaveError, match=f"on {num_layers} layers and so .* too shallow"):
            baseline(name, num_layers)
        with pytest.raises(LayerwaveError, match="too shallow"):
            baselines(num_layers, 3)


@pytest.mark.parametrize(
    ("name", "num_layers", "fault"),
    [
        ("eagle3", 6, r"\[2, 3, 3\] on 6 layers and so repeats a layer"),
        ("eagle3", 3, r"\[2, 1, 0\] on 3 layers and so repeats a layer or reverses their order"),
        ("eagle3_engine", 3, r"\[1, 0, -1\] on 3 layers and so leaves the range"),
        ("eagle3_engine", 5, r"\[1, 1, 1\] on 5 layers and so repeats a layer"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(name, num_layers, fault):
    with pytest.raises(LayerwaveError, match=fault):
        baseline(name, num_layers)


def test_faults():
    with pytest.raises(LayerwaveError, match="unknown rule 'eagle'"):
        baseline("eagle", 36)
    with pytest.raises(LayerwaveError, match="ask for size 1"):
        baseline("eagle2", 36, 3)
    with pytest.raises(LayerwaveError, match="give one"):
        baseline("uniform", 36)
    with pytest.raises(LayerwaveError, match="only 10"):
        random_sets(5, 2, 11, seed=0)


def test_random_sets_are_distinct_sorted_and_seeded():
    sets = random_sets(36, 3, 500, seed=1)
    assert len({tuple(row) for row in sets.tolist()}) == 500
    assert ((sets[:, :-1] < sets[:, 1:]).all(), sets.min() >= 0, sets.max() < 36) == (True, True, True)
    assert (sets == random_sets(36, 3, 500, seed=1)).all()
    assert (sets != random_sets(36, 3, 500, seed=2)).any()
    assert sorted(map(tuple, random_sets(5, 2, 10, seed=3).tolist()))[0] == (0, 1)
