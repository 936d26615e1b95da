"""Settings refuse what the method does not define."""

import pytest

from layerwave.calibration import CalibrationSettings
from layerwave.errors import LayerwaveError


def test_the_defaults_are_the_papers():
    settings = CalibrationSettings()
    assert (settings.rho, settings.block, settings.samples) == (0.3, 32, 200)
    assert (settings.final_state, settings.sinks) == ("pre_norm", "keep")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rho", 0.0),
        ("rho", 1.1),
        ("rho", float("nan")),
        ("block", 0),
        ("samples", 0),
        ("max_length", 31),
        ("sink_multiple", 1.0),
        ("seed", -1),
    ],
)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(LayerwaveError, match=rf"^{field} is {value!r}, but must be"):
        CalibrationSettings(**{field: value})


def test_rho_of_one_is_allowed():
    assert CalibrationSettings(rho=1.0).rho == 1
