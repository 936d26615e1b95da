"""The transition curve finds a planted compartment boundary."""

import literal
import numpy as np
import pytest

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection import find_transitions


@pytest.fixture(scope="module")
def planted():
    """Ten layers in three compartments, 0-3, 4-6 and 7-9: within each, one representation with a little noise."""
    rng = np.random.default_rng(0)
    compartments = rng.normal(size=(3, 24, 6))
    which = np.repeat([0, 1, 2], [4, 3, 3])
    return (compartments[which] + 0.05 * rng.normal(size=(10, 24, 6))).astype(np.float32)


@pytest.mark.parametrize("estimator", ["biased", "debiased"])
def test_planted_boundaries(planted, estimator):
    found = find_transitions(Calibration.from_states(planted), estimator=estimator)
    assert found.peaks == (3, 6)
    assert found.boundaries == (4, 7)
    matrix = {"biased": literal.biased_cka, "debiased": literal.debiased_cka}[estimator](planted.astype(np.float64))
    np.testing.assert_allclose(found.delta, np.linalg.norm(np.diff(matrix, axis=0), axis=1), atol=1e-9)


def test_prominence_decides(planted):
    calibration = Calibration.from_states(planted)
    assert len(find_transitions(calibration, prominence=0.0).peaks) >= 2
    for wrong in (-0.1, 1.1):
        with pytest.raises(LayerwaveError, match="fraction"):
            find_transitions(calibration, prominence=wrong)
    with pytest.raises(LayerwaveError, match="at least 2"):
        find_transitions(Calibration.from_states(planted[:1]))
