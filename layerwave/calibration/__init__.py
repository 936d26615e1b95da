"""Conversations in, block sums of every layer out: one streamed pass over a target."""

from layerwave.calibration.artifact import Calibration
from layerwave.calibration.conversations import read_conversations
from layerwave.calibration.given import GivenStates, calibrate_states
from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.stream import calibrate
from layerwave.calibration.token_sample import TokenSample

__all__ = [
    "Calibration",
    "CalibrationSettings",
    "GivenStates",
    "TokenSample",
    "calibrate",
    "calibrate_states",
    "read_conversations",
]
