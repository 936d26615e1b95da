"""The wave shows what was measured: its curves are the entropies, its marks the sets, its lines the boundaries."""

import dataclasses

import numpy as np
import pytest

from layerwave.calibration import Calibration, CalibrationSettings
from layerwave.report import wave
from layerwave.selection import elsi, select
from layerwave.selection.methods import SelectionSettings

N, B, D = 9, 8, 24


def entropy_by_svd(states):
    p = np.linalg.svd(states.astype(np.float64), compute_uv=False) ** 2
    p /= p.sum(axis=-1, keepdims=True)
    return -(p * np.log(p)).sum(axis=-1)


@pytest.fixture(scope="module")
def calibration():
    """Four pools of random states; from layer 5 on, other features than before it."""
    rng = np.random.default_rng(0)
    early, late = rng.normal(size=(2, 4, 1, B, D))
    states = np.where(np.arange(N)[None, :, None, None] < 5, early, late) + 0.1 * rng.normal(size=(4, N, B, D))
    given = Calibration.from_states(states[0])
    return dataclasses.replace(
        given,
        sums=states.astype(np.float32),
        counts=np.ones(4, np.int64),
        curves=np.zeros((4, 0, N), np.float32),
        kept=np.zeros((4, 0), np.int64),
        settings=CalibrationSettings(block=B, replicates=0),
        target_name="two halves $5",
    )


def drawn(axes, marker):
    return [line for line in axes.lines if line.get_marker() == marker]


def test_curves_are_the_entropies_of_the_pools(calibration):
    entropy = wave(calibration).axes[0]
    for marker, states in (
        ("o", calibration.states),
        ("s", calibration.pool(sinks="drop")),
        ("^", calibration.pool(filtered=False)),
    ):
        (line,) = drawn(entropy, marker)
        np.testing.assert_allclose(line.get_ydata(), entropy_by_svd(states), atol=1e-6)
        assert list(line.get_xdata()) == list(range(N))


def test_marks_are_the_chosen_layers(calibration):
    selections = [elsi(calibration, 3), select(calibration, SelectionSettings("eagle3", 3))]
    marks = drawn(wave(calibration, selections).axes[0], "D")
    assert [tuple(line.get_xdata()) for line in marks] == [selection.layers for selection in selections]
    assert marks[1].get_ydata()[0] < marks[0].get_ydata()[0] < 0


def test_the_planted_boundary_is_drawn(calibration):
    change = wave(calibration).axes[1]
    dashed = [line.get_xdata()[0] for line in change.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    assert dashed == [4]
    assert int(np.argmax(drawn(change, "o")[0].get_ydata())) == 4


def test_a_pool_without_a_block_is_said_not_drawn(calibration):
    counts = np.array([1, 0, 1, 1])
    entropy = wave(dataclasses.replace(calibration, counts=counts)).axes[0]
    (line,) = drawn(entropy, "s")
    assert len(line.get_xdata()) == 0
    assert line.get_label().endswith("no block")


def test_given_states_have_one_curve():
    states = np.random.default_rng(1).normal(size=(N, B, D))
    entropy = wave(Calibration.from_states(states)).axes[0]
    assert [line.get_label() for line in drawn(entropy, "o")] == ["given states"]
