"""Symmetric eigenvalues: values-only LAPACK on the CPU, the batched device solver elsewhere."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from layerwave.kernels.host import on_all_cores
from layerwave.kernels.precision import AnyArray, numpy_in_float64, widen


@numpy_in_float64
def eigenvalues(K: Float[AnyArray, "*batch B B"]) -> Float[AnyArray, "*batch B"]:
    """Eigenvalues of symmetric matrices, ascending; NaN for a matrix that holds a NaN or an infinity.

    On the CPU by LAPACK, values only and in float64 (a host callback); elsewhere by the device's batched
    solver. The first derivative of a symmetric function of the spectrum is exact, also where eigenvalues repeat;
    there is no second one. float32 and float64 are kept.
    """
    return symmetric_eigenvalues(widen(K))


# Not jnp.linalg on the CPU: it computes the vectors too, and its batched solver is slow and unsafe (jax#39292).
@jax.custom_jvp
@jax.jit
def symmetric_eigenvalues(K: Float[Array, "*batch B B"]) -> Float[Array, "*batch B"]:
    """`eigenvalues` inside a trace."""
    values = jax.ShapeDtypeStruct(K.shape[:-1], K.dtype)
    return jax.lax.platform_dependent(
        K, cpu=lambda K: _on_host(_values_on_host, K, (values,))[0], default=jnp.linalg.eigvalsh
    )


@symmetric_eigenvalues.defjvp
def _derivative(primals, tangents):
    """`dλ_i = v_iᵀ dK v_i`."""
    (K,), (dK,) = primals, tangents
    shapes = (jax.ShapeDtypeStruct(K.shape[:-1], K.dtype), jax.ShapeDtypeStruct(K.shape, K.dtype))
    values, vectors = jax.lax.platform_dependent(
        K, cpu=lambda K: _on_host(np.linalg.eigh, K, shapes), default=lambda K: tuple(jnp.linalg.eigh(K))
    )
    highest = jax.lax.Precision.HIGHEST
    return values, jnp.einsum("...bi,...bc,...ci->...i", vectors, dK, vectors, precision=highest)


def _values_on_host(K: Float[np.ndarray, "*batch B B"]) -> tuple[Float[np.ndarray, "*batch B"]]:
    matrices = K.reshape(-1, *K.shape[-2:])
    return (on_all_cores(np.linalg.eigvalsh, matrices).reshape(K.shape[:-1]),)


def _on_host(solve: Callable, K: jax.Array, results: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
    """Runs a numpy solver on `K` in a callback.

    Floats cross as 32-bit words: the callback may run in a thread of its own, where `jax.enable_x64` is off and
    JAX would narrow float64 to float32 on the way in and out.
    """
    dtype, num_words = K.dtype, K.dtype.itemsize // 4

    def callback(words: jax.Array) -> tuple[np.ndarray, ...]:
        matrices = np.ascontiguousarray(words).view(dtype)[..., 0].astype(np.float64, copy=False)
        # One matrix that is not finite makes LAPACK fail on the whole batch: solved as zero, reported as NaN.
        broken = ~(np.isfinite(matrices.max((-2, -1))) & np.isfinite(matrices.min((-2, -1))))
        if broken.any():
            matrices = np.where(broken[..., None, None], 0, matrices)
        solved = [result.astype(dtype, copy=False) for result in solve(matrices)]
        for result in solved:
            result[broken] = np.nan
        return tuple(result[..., None].view(np.uint32) for result in solved)

    words = jax.lax.bitcast_convert_type(K, jnp.uint32).reshape(*K.shape, num_words)
    shapes = tuple(jax.ShapeDtypeStruct((*result.shape, num_words), np.uint32) for result in results)
    solved = jax.pure_callback(callback, shapes, words, vmap_method="broadcast_all")
    return tuple(jax.lax.bitcast_convert_type(words if num_words == 2 else words[..., 0], dtype) for words in solved)
