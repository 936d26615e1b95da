"""Cutting the kept tokens of a sample into blocks and summing them: one product with a 0/1 matrix."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from layerwave.errors import LayerwaveError
from layerwave.kernels.precision import AnyArray


def block_matrix(keep: Bool[AnyArray, " T"], block: int) -> tuple[Float[Array, "B T"], Int32[Array, ""]]:
    """Matrix `P` of 0 and 1 that sums a sample's kept tokens over blocks, and the number of whole blocks.

    The kept token of rank `r` goes to row `r mod B`; tokens of a trailing partial block go nowhere, so `P / blocks`
    takes the block mean. float32; `block` is static.

    Raises `LayerwaveError` for a block of fewer than 1 token.

    Source: the paper (arXiv 2610.12939), eq. 11.
    """
    if block < 1:
        raise LayerwaveError(f"block={block}: expected at least 1 token a block")
    return _block_matrix(keep, block)


@partial(jax.jit, static_argnames="block")
def _block_matrix(keep: Bool[Array, " T"], block: int) -> tuple[Float[Array, "B T"], Int32[Array, ""]]:
    rank = jnp.cumsum(keep, dtype=jnp.int32) - 1
    blocks = jnp.sum(keep, dtype=jnp.int32) // block
    used = keep & (rank < blocks * block)
    row = jnp.arange(block, dtype=jnp.int32)
    return (used[None] & (rank[None] % block == row[:, None])).astype(jnp.float32), blocks


@jax.jit
def block_sums(P: Float[AnyArray, "B T"], states: Float[AnyArray, "N T D"]) -> Float[Array, "N B D"]:
    """Sums over blocks `P h_l` of the states of every layer, float32 (float64 for float64 states).

    States have to be finite at every position, dropped ones included.
    """
    return jnp.einsum(
        "bt,ntd->nbd",
        P.astype(states.dtype),  # 0 and 1 are exact in every float type
        states,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float64 if states.dtype == jnp.float64 else jnp.float32,
    )
