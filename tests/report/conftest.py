"""A calibration with planted answers: compartments, and variances over prompts."""

from dataclasses import replace

import numpy as np
import pytest

from layerwave.calibration import Calibration, CalibrationSettings
from tests.token_samples import planted_tokens

N, B, D, S = 9, 8, 16, 6
CUTS = {"early": 50.0, "middle": 75.0, "late": 0.0}
"""Percentage by which the filter cuts the planted variance."""
NO_BLOCK = 4
"""The sample whose filtered pool gave no block."""


def compartments(rng: np.random.Generator, ends: tuple[int, ...]) -> np.ndarray:
    """States (N, B, D) that are alike within a compartment; each of `ends` is the last layer of one."""
    place = np.searchsorted(ends, np.arange(N))
    bases = rng.normal(size=(len(ends) + 1, B, D))
    return bases[place] + 0.05 * rng.normal(size=(N, B, D))


@pytest.fixture(scope="session")
def planted() -> Calibration:
    """Filtered: compartments end with layers 2 and 5; all tokens: with layer 3."""
    rng = np.random.default_rng(0)
    filtered, everything = compartments(rng, (2, 5)), compartments(rng, (3,))
    counts = np.array([5, 4, 20, 19])
    sums = np.stack([filtered, filtered, everything, everything]) * counts[:, None, None, None]
    wave = 1.5 + 0.3 * np.sin(np.arange(N))
    spread = np.linspace(-0.2, 0.2, S)[:, None]
    kept_share = 1 - np.repeat([CUTS["early"], CUTS["middle"], CUTS["late"]], [2, 5, 2]) / 100
    with_filter, without = wave + spread * np.sqrt(kept_share), wave + spread
    with_filter[NO_BLOCK] = np.nan
    curves = np.stack([with_filter, with_filter, without, without])
    lengths = rng.integers(60, 90, S)
    kept = np.stack([lengths // 3, lengths // 3, lengths, lengths])
    kept[:2, NO_BLOCK] = B - 1
    return Calibration(
        sums=sums.astype(np.float32),
        counts=counts,
        curves=curves.astype(np.float32),
        kept=kept,
        lengths=lengths,
        sinks=np.ones(S, np.int64),
        fingerprints=np.arange(S, dtype=np.uint64),
        settings=CalibrationSettings(block=B, replicates=0),
        target_name="planted",
        target_fingerprint="0123",
        target_dtype="float32",
        tallies={"rows": S},
    )


@pytest.fixture(scope="session")
def with_tokens(planted) -> Calibration:
    """The same with a token sample: what the target says next stands in layers 3 and 6."""
    return replace(planted, tokens=planted_tokens(N, (3, 6)))
