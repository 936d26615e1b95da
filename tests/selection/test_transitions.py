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


def literal_prominence(curve, peak):
    """How far a peak stands above the higher of the lowest points that part it from higher ground on either side."""
    sides = curve[:peak][::-1], curve[peak + 1 :]
    return curve[peak] - max(
        min(side[: next((i for i, value in enumerate(side) if value > curve[peak]), len(side))]) for side in sides
    )


def test_prominence_decides(planted):
    calibration = Calibration.from_states(np.random.default_rng(1).normal(size=(16, 24, 6)))
    delta = find_transitions(calibration).delta
    summits = [l for l in range(1, len(delta) - 1) if delta[l - 1] < delta[l] > delta[l + 1]]
    shares = {l: literal_prominence(delta, l) / delta.max() for l in summits}
    assert len(shares) >= 4
    for least in (0.0, *(share * factor for share in shares.values() for factor in (0.999, 1.001)), 1.0):
        expected = tuple(l for l in summits if shares[l] >= least)
        assert find_transitions(calibration, prominence=min(least, 1.0)).peaks == expected
    assert find_transitions(calibration).peaks == tuple(l for l in summits if shares[l] >= 0.1)
    for wrong in (-0.1, 1.1):
        with pytest.raises(LayerwaveError, match="fraction"):
            find_transitions(calibration, prominence=wrong)
    with pytest.raises(LayerwaveError, match="at least 2"):
        find_transitions(Calibration.from_states(planted[:1]))
