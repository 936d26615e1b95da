"""ELSI, ELSI-C and the exhaustive search against a literal implementation that concatenates and takes SVDs."""

import math

import literal
import numpy as np
import problems
import pytest

from layerwave.calibration import Calibration
from layerwave.selection import elsi, elsi_c, exhaustive

SEEDS = range(50)


def problem(seed):
    """States in float32 and float64, and a size; beams narrow enough that pruning decides."""
    rng = np.random.default_rng(1000 + seed)
    num_layers = int(rng.choice([4, 8, 14]))  # few numbers of layers, for each compiles anew
    states = problems.states(seed, num_layers)
    return Calibration.from_states(states), states.astype(np.float64), int(rng.integers(1, 5))


def assert_same(selection, beams, choice, score_tolerance=1e-9):
    layers, score = choice
    assert selection.layers == layers
    assert selection.score == pytest.approx(score, abs=score_tolerance)
    assert [[s for s, _ in beam] for beam in selection.beams] == [[s for s, _ in beam] for beam in beams]
    ours = [value for beam in selection.beams for _, value in beam]
    np.testing.assert_allclose(ours, [value for beam in beams for _, value in beam], atol=score_tolerance, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_elsi(seed):
    calibration, states, size = problem(seed)
    beam, expand = (1, 4)[seed % 2], 1 + seed % 3
    assert_same(elsi(calibration, size, beam, expand), *literal.elsi(states, size, beam, expand))


@pytest.mark.parametrize("seed", SEEDS)
def test_elsi_c(seed):
    calibration, states, size = problem(seed)
    beam, pool = (1, 4)[seed % 2], 1 + seed % 5
    assert_same(elsi_c(calibration, size, beam, pool), *literal.elsi_c(states, size, beam, pool))


@pytest.mark.parametrize("seed", SEEDS)
def test_exhaustive(seed):
    calibration, states, size = problem(seed)
    ranked, choice = literal.exhaustive(states, size)
    assert_same(exhaustive(calibration, size), [ranked[:10]], choice)


@pytest.mark.parametrize("seed", range(14))
def test_default_widths_and_low_entropy(seed):
    calibration, states, size = problem(seed)
    assert_same(elsi(calibration, size), *literal.elsi(states, size))
    assert_same(elsi(calibration, size, objective="min"), *literal.elsi(states, size, sign=-1))


@pytest.mark.parametrize("seed", range(14))
def test_trace_weighting(seed):
    calibration, states, size = problem(seed)
    weighted = literal.trace_weighted(states)
    assert_same(elsi(calibration, size, 4, 2, weighting="trace"), *literal.elsi(weighted, size, 4, 2))
    assert_same(elsi_c(calibration, size, 4, 2, weighting="trace"), *literal.elsi_c(weighted, size, 4, 2))
    ranked, choice = literal.exhaustive(weighted, size)
    assert_same(exhaustive(calibration, size, weighting="trace"), [ranked[:10]], choice)


@pytest.mark.parametrize("seed", [0, 1, 4, 5])
def test_debiased_estimator(seed):
    calibration, states, size = problem(seed)
    expected = literal.elsi_c(states, size, 4, 2, estimator="debiased")
    assert_same(elsi_c(calibration, size, 4, 2, estimator="debiased"), *expected)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("seed", [0, 1])
def test_other_orders(seed, alpha):
    calibration, states, size = problem(seed)
    assert_same(elsi(calibration, size, 4, 3, alpha), *literal.elsi(states, size, 4, 3, alpha))
    ranked, choice = literal.exhaustive(states, size, alpha)
    assert_same(exhaustive(calibration, size, alpha), [ranked[:10]], choice)
