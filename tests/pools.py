"""Calibrations with the four pools of a pass, made of given states."""

import numpy as np

from layerwave.calibration import Calibration, CalibrationSettings


def calibration_of(pools: np.ndarray, empty: tuple[int, ...] = (), data: int = 1, **settings) -> Calibration:
    """States (4, N, B, D) in the order of `POOLS` as one pass left them; `empty` pools hold no block."""
    counts = np.array([0 if pool in empty else 2 for pool in range(4)])
    _, layers, block, _ = pools.shape
    return Calibration(
        sums=(pools * counts[:, None, None, None]).astype(np.float32),
        counts=counts,
        curves=np.zeros((4, 1, layers), np.float32),
        kept=np.repeat(counts[:, None] * block, 1, axis=1),
        lengths=np.array([2 * block]),
        sinks=np.array([1]),
        fingerprints=np.array([data], np.uint64),
        settings=CalibrationSettings(block=block, max_length=4 * block, **settings),
        target_name="planted",
        target_fingerprint="0",
        target_dtype="float32",
        tallies={},
    )
