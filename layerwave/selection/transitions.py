"""The transition curve over depth and its peaks, the compartment boundaries (paper section 3.3)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import cka
from layerwave.kernels import transitions as transition_sizes


@dataclass(frozen=True, eq=False)
class Transitions:
    """Where the representation changes over depth."""

    delta: Float[np.ndarray, " steps"]
    """`δ_l = ‖M_{l+1,:} - M_{l,:}‖₂`, the step from layer l to layer l+1 (paper eq. 8)."""
    peaks: tuple[int, ...]
    """The steps l that stand out: a compartment ends with layer l, at boundary `l + 1`."""
    prominence: float
    """Threshold that the peaks passed, as a fraction of the curve's greatest value."""
    estimator: str

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The peaks as boundaries `b = l + 1`."""
        return tuple(step + 1 for step in self.peaks)


def find_transitions(
    calibration: Calibration, *, estimator: Literal["biased", "debiased"] = "biased", prominence: float = 0.1
) -> Transitions:
    """The curve of CKA transitions and its peaks, by `scipy.signal.find_peaks`.

    The first and the last step have one neighbour only and are never peaks.

    Args:
        estimator: of the CKA: `biased` (the paper), or `debiased`.
        prominence: how far a peak must stand above its surroundings, as a fraction of the greatest step; 0 … 1.

    Raises:
        LayerwaveError: for a prominence outside 0 … 1, fewer than two layers, and a layer whose CKA is undefined.
    """
    from scipy.signal import find_peaks

    if not 0 <= prominence <= 1:
        raise LayerwaveError(f"prominence is {prominence}: it is a fraction of the greatest step, 0 to 1")
    if calibration.num_layers < 2:
        raise LayerwaveError("one layer has no transitions: at least 2 layers are needed")
    delta = transition_sizes(cka(calibration.states, estimator))
    peaks, _ = find_peaks(delta, prominence=prominence * delta.max())
    return Transitions(delta, tuple(peaks.tolist()), prominence, estimator)
