"""What every kernel that takes layer sets asks of them, and how it streams through them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from layerwave.errors import LayerwaveError
from layerwave.kernels.precision import AnyArray, is_concrete


def check_sets(sets: Int[AnyArray, "M m"], num_layers: int) -> None:
    """Raises `LayerwaveError` for empty sets, and for concrete ones with a layer out of range or repeated."""
    if sets.shape[1] == 0:
        raise LayerwaveError("layer sets of size 0: expected at least one layer a set")
    if not is_concrete(sets):
        return
    ordered = np.sort(np.asarray(sets), axis=1)
    outside = (ordered < 0) | (ordered >= num_layers)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise LayerwaveError(
            f"layer {ordered[row, column]} in the set {np.asarray(sets)[row].tolist()} is out of range: "
            f"expected 0 to {num_layers - 1}"
        )
    repeated = ordered[:, 1:] == ordered[:, :-1]
    if repeated.any():
        row, column = np.argwhere(repeated)[0]
        raise LayerwaveError(
            f"layer {ordered[row, column]} is repeated in the set {np.asarray(sets)[row].tolist()}: "
            "expected distinct layers"
        )


def map_sets(
    function: Callable[[Float[Array, "c B B"]], Float[Array, "c *rest"]],
    K: Float[Array, "N B B"],
    sets: Int[Array, "M m"],
    chunk: int,
) -> Float[Array, "M *rest"]:
    """`function` of the summed Gram of every set, in chunks, so that memory does not grow with `M`; inside a jit."""
    # Whole chunks of one length: one program computes them all, and equal sets round alike wherever they stand.
    count = len(sets)
    chunk = min(chunk, 2 ** math.ceil(math.log2(max(count, 1))))
    padded = jnp.pad(jnp.sort(sets, axis=1), ((0, -count % chunk), (0, 0)))

    def of_chunk(layers: Int[Array, "c m"]) -> Float[Array, "c *rest"]:
        # One layer after the other: gathered together and then summed, they cost a CPU seven times as much.
        return function(sum(K[layers[:, place]] for place in range(layers.shape[1])))

    results = jax.lax.map(of_chunk, padded.reshape(-1, chunk, sets.shape[1]))
    return results.reshape(-1, *results.shape[2:])[:count]
