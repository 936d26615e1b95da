"""Gram matrices: everything that the selection reads from the states of a layer."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from layerwave.kernels.host import host_grams
from layerwave.kernels.precision import AnyArray, wide_dtype, widen


def gram(states: Real[AnyArray, "*batch B D"]) -> Float[AnyArray, "*batch B B"]:
    """Uncentred Gram matrix `K = X Xᵀ` of the rows (tokens) of each `X`, exactly symmetric.

    Grams add: the Gram of a concatenation along features is the sum of the Grams, so `N` of them stand for every
    layer set. float32 and float64 are kept, everything else becomes float32. Numpy arrays are multiplied in
    float64 and rounded once. Float32 products of JAX arrays cost up to 1e-5 nats of entropy when the states are nearly
    of low rank: the small eigenvalues are then rounding and nothing else.

    Source: the paper (arXiv 2610.12939), eq. 4.
    """
    if isinstance(states, np.ndarray):
        return host_grams(states).astype(wide_dtype(states))
    return _gram(widen(states))


@jax.jit
def _gram(states: Float[Array, "*batch B D"]) -> Float[Array, "*batch B B"]:
    # The default precision is TF32 on GPUs and bfloat16 passes on TPUs, which gives eigenvalues of -2e-3.
    product = jnp.einsum("...bd,...cd->...bc", states, states, precision=jax.lax.Precision.HIGHEST)
    return (product + jnp.swapaxes(product, -1, -2)) / 2
