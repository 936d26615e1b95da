"""What rounding may turn around is named: at the end of a search, and at the cuts within it."""

from itertools import pairwise

import numpy as np
import problems
import pytest

from layerwave.calibration import Calibration
from layerwave.selection import elsi, elsi_c

N = 8
CALIBRATION = Calibration.from_states(problems.states(0, 6))


class Planted:
    """A criterion: planted scores, else 0; it may be asked for a set once."""

    __name__ = "planted"

    def __init__(self, scores):
        self.scores, self.asked = scores, []

    def __call__(self, sets):
        self.asked += [tuple(row) for row in sets.tolist()]
        assert len(set(self.asked)) == len(self.asked)
        return np.array([self.scores.get(tuple(row), 0.0) for row in sets.tolist()])


@pytest.mark.parametrize(
    ("gap", "pairs", "other"),
    [
        (5e-6, {(1, 2): 2.0, (3, 4): 3.0}, "3,4"),
        (5e-6, {(1, 2): 2.0, (3, 4): 1.0}, "3,4"),  # then the better one is not found
        (2e-5, {(1, 2): 2.0, (3, 4): 3.0}, None),  # no near tie
        (5e-6, {(1, 2): 1.0, (1, 3): 2.0}, None),  # both ways lead to one set
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_near_tie_at_a_cut_is_named_where_it_decides(gap, pairs, other, sign):
    scores = {(1,): 1.0, (3,): 1.0 - gap, **pairs}
    criterion = Planted({layers: sign * score for layers, score in scores.items()})
    found = elsi(CALIBRATION, 2, beam=1, criterion=criterion, objective="max" if sign > 0 else "min")
    said = "near tie: less than 1e-05 decides whether the beam keeps 1 or 3, and so between 1,2 and "
    assert [warning.split(", which")[0] for warning in found.warnings] == ([said + other] if other else [])


def test_a_search_says_one_line(caplog):
    """Of near ties at the end and within."""
    planted = {(1,): 1.0, (3,): 1.0 - 5e-6, (1, 2): 2.0, (1, 5): 2.0 - 5e-6, (3, 4): 3.0}
    found = elsi(CALIBRATION, 2, beam=2, expand=6, criterion=Planted(planted | {(0,): 1.5}))
    assert found.warnings == (
        "near tie: 1,2 and 1,5 differ by less than 1e-05 in planted; less than 1e-05 decides whether the beam keeps "
        "1 or 3, and so between 1,2 and 3,4, which other batches, devices or machines may turn around",
    )
    assert caplog.messages == list(found.warnings)


def closest_switches(search, seed):
    """Selections from states that differ by about 1e-7, and yet are not the same."""
    start, end = (problems.states(s, N).astype(np.float64) for s in (seed, seed + 49))

    def found(share):
        return search(Calibration.from_states(((1 - share) * start + share * end).astype(np.float32)))

    shares = np.linspace(0.1, 0.9, 5)
    for low, high in pairwise(shares):
        one, other = found(low), found(high)
        while one.layers != other.layers and high - low > 1e-7:
            middle = (low + high) / 2
            between = found(middle)
            if between.layers == one.layers:
                low, one = middle, between
            else:
                high, other = middle, between
        if one.layers != other.layers:
            yield one, other


SEARCHES = {
    "elsi": lambda calibration: elsi(calibration, 3, beam=2, expand=3),
    "elsi_c": lambda calibration: elsi_c(calibration, 3, beam=2, pool=2),
    "low_entropy": lambda calibration: elsi(calibration, 3, beam=2, objective="min"),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_where_the_choice_switches_each_side_names_the_other(name):
    """Whatever makes it switch: the last scores, a beam's cut, or the cut of ELSI-C's proposals."""
    cuts = 0
    for one, other in closest_switches(SEARCHES[name], seed=2):
        for found, instead in ((one, other), (other, one)):
            (warning,) = found.warnings
            assert ",".join(map(str, instead.layers)) in warning
            cuts += "the beam keeps" in warning
    assert cuts  # this seed has them
