"""States to measure on: random, with the drift and the growing norms of a real model."""

import numpy as np
from jaxtyping import Float32


def random_states(
    layers: int, rows: int, features: int, seed: int = 0
) -> Float32[np.ndarray, "{layers} {rows} {features}"]:
    """Block-averaged states (N, B, D) whose layers resemble their neighbours and whose norms grow from 6 to 185."""
    steps = np.random.default_rng(seed).standard_normal((layers, rows, features), np.float32)
    growth = np.geomspace(6, 185, layers, dtype=np.float32)[:, None, None]
    return growth * np.cumsum(steps, axis=0) / np.sqrt(np.float32(features))
