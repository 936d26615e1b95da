"""Random states as models have them: drift, low rank, massive channels, sink tokens, growing norms, copies."""

import numpy as np

KINDS = ("gauss", "drift", "low_rank", "massive", "sink", "norms", "copies")


def states(seed: int, num_layers: int, block: int = 10, features: int = 12) -> np.ndarray:
    """Float32 states (N, B, D) of the kind that the seed chooses."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    X = rng.normal(size=(num_layers, block, features))
    if kind == "drift":
        X = np.cumsum(X, axis=0)
    elif kind == "low_rank":
        ranks = rng.integers(1, 4, num_layers)
        X = np.stack([x[:, :r] @ rng.normal(size=(r, features)) for x, r in zip(X, ranks, strict=True)])
    elif kind == "massive":
        X[num_layers // 2 :, :, 3] += 300.0
    elif kind == "sink":
        X[1:-1, 0] *= 100.0
    elif kind == "norms":
        X *= np.geomspace(1, 20, num_layers)[:, None, None]
    elif kind == "copies":
        X[1] = X[0]
        X[num_layers // 2] = X[num_layers - 1]
        X[num_layers - 2] = X[num_layers - 1]
    return X.astype(np.float32)
