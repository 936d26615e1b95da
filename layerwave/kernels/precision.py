"""Which float type and which device a kernel computes with, decided once.

- Numpy arrays in, numpy arrays out: computed in float64 on the CPU, where float64 is native on every machine, in a
  local `jax.enable_x64` context. Not float64 JAX arrays: outside of such a context the next operation that touches
  one narrows it to float32, without a word.
- JAX arrays, traced or not: their own precision, float32 at least, on their own device.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from layerwave.errors import LayerwaveError

AnyArray = jax.Array | np.ndarray


def is_concrete(*arrays: AnyArray) -> bool:
    """True outside of a trace, where values can be looked at."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def wide_dtype(array: AnyArray) -> np.dtype:
    """float64 for float64; float32 for everything else, half precision included: a Gram overflows in it."""
    return np.dtype(np.float64 if array.dtype == np.float64 else np.float32)


def widen(array: AnyArray) -> jax.Array:
    """The array in its `wide_dtype`. Raises `LayerwaveError` for float64 where JAX would narrow it to float32."""
    if array.dtype == np.float64 and not jax.config.jax_enable_x64:
        raise LayerwaveError(
            "a float64 array met JAX with float64 off, which would narrow it to float32: "
            "call inside `with jax.enable_x64(True)`, or give numpy arrays outside of jit"
        )
    return jnp.asarray(array, wide_dtype(array))


def numpy_in_float64(kernel: Callable) -> Callable:
    """Decorator that states the rules above; numpy results are rounded once, to the `wide_dtype` of the input."""

    @functools.wraps(kernel)
    def on_host(array, *others, **settings):
        if isinstance(array, np.ndarray) and is_concrete(*others):
            return _in_float64(kernel, array, *others, **settings).astype(wide_dtype(array))
        return kernel(array, *others, **settings)

    return on_host


def always_in_float64(kernel: Callable) -> Callable:
    """Decorator for `N x N` tables: any array that is not traced is treated as numpy, and the result stays float64."""

    @functools.wraps(kernel)
    def on_host(array, *others, **settings):
        if is_concrete(array, *others):
            return _in_float64(kernel, array, *others, **settings)
        return kernel(array, *others, **settings)

    return on_host


def _in_float64(kernel: Callable, array: AnyArray, *others: AnyArray, **settings) -> np.ndarray:
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        platforms = jax.config.jax_platforms
        raise LayerwaveError(
            f"float64 kernels run on JAX's CPU backend, which JAX_PLATFORMS={platforms} leaves out: "
            f"set JAX_PLATFORMS={platforms},cpu"
        ) from error
    # Compile-time evaluation, so that constants inside somebody's `jit` are computed here and now as well.
    with jax.enable_x64(True), jax.default_device(cpu), jax.ensure_compile_time_eval():
        return np.asarray(kernel(np.asarray(array, np.float64), *map(np.asarray, others), **settings))
