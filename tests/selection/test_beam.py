"""The beam engine: criteria, parents, invariances and faults."""

from dataclasses import replace

import numpy as np
import problems
import pytest

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import gram_table
from layerwave.selection import elsi, elsi_c, exhaustive, make_criterion
from layerwave.selection.beam import greatest_transitions

N = 8


@pytest.fixture(scope="module")
def calibration():
    return Calibration.from_states(problems.states(0, N))


def test_any_function_is_a_criterion(calibration):
    def distance_to_targets(sets):
        return -np.abs(sets.sum(axis=1) - 11.0)

    found = elsi(calibration, 3, criterion=distance_to_targets)
    assert found.criterion == "distance_to_targets"
    assert found.score == 0.0
    assert found.layers == exhaustive(calibration, 3, criterion=distance_to_targets).layers == (0, 4, 7)


def test_a_criterion_that_fails_is_named(calibration):
    with pytest.raises(LayerwaveError, match=r"gives nan for layers \[0\]"):
        elsi(calibration, 2, criterion=lambda sets: np.full(len(sets), np.nan))
    with pytest.raises(LayerwaveError, match="unknown criterion 'acceptnce'"):
        elsi(calibration, 2, criterion="acceptnce")


def test_parents_are_the_beam_members_that_reach_a_set(calibration):
    for found in (elsi(calibration, 3, beam=4, expand=N), elsi_c(calibration, 3, beam=4, pool=2)):
        assert all(not edges for edges in found.parents[0])
        for depth in (1, 2):
            for (layers, _), edges in zip(found.beams[depth], found.parents[depth], strict=True):
                inside = [p for p, (parent, _) in enumerate(found.beams[depth - 1]) if set(parent) < set(layers)]
                assert edges
                assert set(edges) <= set(inside)
                if found.method == "elsi":  # every extension was kept, so every subset in the beam is a parent
                    assert list(edges) == inside


def test_scores_and_choice_do_not_change_with_scale_rotation_and_token_order(calibration):
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(12, 12)))[0].astype(np.float32)
    order = rng.permutation(10)
    for changed in (calibration.states * 64, calibration.states @ rotation, calibration.states[:, order]):
        other = Calibration.from_states(changed)
        for method in (elsi, elsi_c, exhaustive):
            for weighting in ("raw", "trace"):
                a, b = method(calibration, 3, weighting=weighting), method(other, 3, weighting=weighting)
                assert a.layers == b.layers
                assert a.score == pytest.approx(b.score, abs=1e-6)


def test_trace_weighting_forgets_the_norms_of_layers(calibration):
    scaled = Calibration.from_states(calibration.states * 2.0 ** np.arange(N, dtype=np.float32)[:, None, None])
    for method in (elsi, elsi_c, exhaustive):
        a, b = method(calibration, 2, weighting="trace"), method(scaled, 2, weighting="trace")
        assert a.layers == b.layers
        assert a.score == pytest.approx(b.score, abs=1e-12)
    assert elsi(scaled, 2).score != pytest.approx(elsi(calibration, 2).score, abs=1e-3)


def test_identical_layers_give_the_first_sets():
    copies = Calibration.from_states(np.repeat(problems.states(0, 1), 6, axis=0))
    assert elsi(copies, 3).layers == elsi_c(copies, 3).layers == exhaustive(copies, 3).layers == (0, 1, 2)
    assert elsi(copies, 3, objective="min").layers == (0, 1, 2)
    assert elsi(copies, 1).layers == (4,)


def test_one_layer_is_chosen_after_the_middle_even_from_below_the_beam():
    # Layers 0 and 1 have the greatest entropy; a beam of one holds only layer 0.
    states = np.stack([np.diag(np.geomspace(1, 2.0**-rate, 8)) for rate in (1, 2, 4, 5, 7, 6)])
    cal = Calibration.from_states(states)
    for found in (elsi(cal, 1, beam=1), elsi_c(cal, 1, beam=1), exhaustive(cal, 1, beam=1)):
        assert found.layers == (5,)
        assert [layers for layers, _ in found.beams[-1]] == [(0,)]
    assert elsi(cal, 2, beam=1).layers == (0, 1)  # seeds are not limited


def test_all_layers_is_one_set():
    four = Calibration.from_states(problems.states(0, 4))
    for method in (elsi, elsi_c, exhaustive):
        assert method(four, 4).layers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: elsi(c, 0), "between 1 and the number of layers, 8"),
        (lambda c: elsi_c(c, 9), "between 1 and the number of layers, 8"),
        (lambda c: exhaustive(c, 9), "between 1 and the number of layers, 8"),
        (lambda c: elsi(c, 2, beam=0), "beam is 0"),
        (lambda c: elsi(c, 2, expand=0), "expand is 0"),
        (lambda c: elsi_c(c, 2, pool=-1), "pool is -1"),
        (lambda c: exhaustive(c, 2, beam=0), "beam is 0"),
        (lambda c: elsi(c, 2, alpha=0.0), "alpha"),
        (lambda c: elsi(c, 2, alpha=float("nan")), "alpha"),
        (lambda c: elsi(c, 2, weighting="norm"), "unknown weighting 'norm'"),
    ],
)
def test_faults_of_options(calibration, call, message):
    with pytest.raises(LayerwaveError, match=message):
        call(calibration)


def test_an_objective_that_there_is_not(calibration, unchecked_signatures):
    with pytest.raises(LayerwaveError, match="objective is 'least': choose max or min"):
        elsi(calibration, 2, objective="least")


@pytest.mark.parametrize(("value", "message"), [(0.0, "layer 3 are all zero"), (np.nan, "layer 3 hold NaN")])
def test_faults_of_states(calibration, value, message):
    sums = calibration.sums.copy()
    sums[0, 3] = value
    damaged = replace(calibration, sums=sums)
    for method in (elsi, elsi_c, exhaustive):
        with pytest.raises(LayerwaveError, match=message):
            method(damaged, 2)


def test_a_constant_layer_has_entropy_but_no_cka(calibration):
    states = calibration.states.copy()
    states[5] = states[5, :1]
    constant = Calibration.from_states(states)
    assert elsi(constant, 2).score > 0
    with pytest.raises(LayerwaveError, match="layer 5"):
        elsi_c(constant, 2)


def test_entropy_is_finite_for_a_batch_of_any_length(calibration):
    _, score = make_criterion(calibration, "entropy", 1.0, "raw")
    for count in (1, 64, 65):
        assert score(np.tile([[1, 2]], (count, 1))) == pytest.approx([score(np.array([[1, 2]]))[0]] * count, abs=0)


def transitions_given_a_heavy_layer(ratio):
    """The four layers that ELSI-C would try after layer 6, when its norm is `ratio` times that of the others."""
    states = np.random.default_rng(5).normal(size=(N + 2, 12, 16))
    states[6] *= ratio
    proposed = greatest_transitions(gram_table(states)[None], pool=4)(np.zeros(1, int), np.array([[6]]))
    return tuple(np.flatnonzero(proposed[0]).tolist())


def test_a_heavy_layer_does_not_tie_the_transitions():
    """With the ratio the transitions shrink as its inverse square, and keep their order."""
    resolved = transitions_given_a_heavy_layer(100.0)
    assert resolved != (0, 1, 2, 3)
    assert transitions_given_a_heavy_layer(1000.0) == resolved


def test_lost_transitions_are_said_and_fall_to_the_first_layers(caplog):
    assert transitions_given_a_heavy_layer(1e6) == (0, 1, 2, 3)
    assert "no conditional transition is left given layers [6]" in caplog.text


def test_a_selection_names_its_calibration(calibration):
    other = Calibration.from_states(problems.states(1, N))
    assert elsi(calibration, 2).calibration == calibration.fingerprint != other.fingerprint
    assert exhaustive(calibration, 2).calibration == calibration.fingerprint
