"""Where numpy beats XLA on a CPU: Grams of states in float64 and LAPACK, on all cores that this process may use."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from jaxtyping import Float, Real, Shaped

from layerwave.doctor import usable_cores

LEAST = 16
"""Items that are worth a thread of their own: hundreds of microseconds of work."""


def on_all_cores(
    function: Callable[[np.ndarray], np.ndarray], stack: Shaped[np.ndarray, "n *rest"]
) -> Shaped[np.ndarray, "n *_"]:
    """`function` of a stack, which works on each item by itself; one part of the stack a core."""
    parts = min(usable_cores(), len(stack) // LEAST)
    if parts < 2:
        return function(stack)
    return np.concatenate(list(_pool().map(function, np.array_split(stack, parts))))


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: numpy lets go of the interpreter while it computes."""
    return ThreadPoolExecutor(usable_cores(), "layerwave")


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def host_grams(
    states: Real[np.ndarray, "*batch B D"], shift: Callable[[np.ndarray], np.ndarray] = lambda X: X
) -> Float[np.ndarray, "*batch B B"]:
    """Grams `X Xᵀ` in float64, exactly symmetric, of the layers after `shift`, a function of one layer `(B, D)`.

    One layer at a time, so that its float64 copy stays in the cache: an eighth of the time of XLA's batched products.
    """

    def of_layers(layers: Real[np.ndarray, "n B D"]) -> Float[np.ndarray, "n B B"]:
        grams = np.empty((len(layers), B, B))
        with np.errstate(all="ignore"):  # what is not finite is for the caller to name
            for layer, product in zip(layers, grams, strict=True):
                X = shift(layer.astype(np.float64))
                np.matmul(X, X.T, out=product)
        return (grams + grams.swapaxes(1, 2)) / 2

    B, D = states.shape[-2:]
    return on_all_cores(of_layers, states.reshape(-1, B, D)).reshape(*states.shape[:-1], B)
