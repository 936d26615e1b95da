"""Rényi entropy of Gram spectra: of one matrix, and of every layer set of a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from layerwave.errors import LayerwaveError
from layerwave.kernels.lapack import symmetric_eigenvalues
from layerwave.kernels.precision import AnyArray, numpy_in_float64, widen
from layerwave.kernels.sets import check_sets, map_sets


def matrix_entropy(K: Float[AnyArray, "*batch B B"], alpha: int | float = 1.0) -> Float[AnyArray, "*batch"]:
    """Rényi entropy `S_α = log(Σ p_i^α) / (1-α)` in nats of `p = λ(K) / tr K`, with eigenvalues clipped at 0.

    `alpha` is static, greater than 0, possibly `math.inf`. The limits 1 (`-Σ p log p`) and ∞ (`-log max p`) are
    exact, `α = 2` needs no eigenvalues, and values near 1 lose no digits. An all-zero Gram, or one that is not
    finite, has no entropy: NaN. float32 and float64 are kept.

    Raises `LayerwaveError` for other `alpha`, and for `alpha < 1` of a float32 Gram: the small eigenvalues that then
    matter drown in it as soon as one channel is massive.

    Source: the paper (arXiv 2610.12939), eq. 4-6.
    """
    _check_alpha(alpha, K)
    return _matrix_entropy(K, alpha=float(alpha))


@numpy_in_float64
def _matrix_entropy(K: Float[AnyArray, "*batch B B"], *, alpha: float) -> Float[AnyArray, "*batch"]:
    return _gram_entropy(widen(K), alpha)


@partial(jax.jit, static_argnames="alpha")
def _gram_entropy(K: Float[Array, "*batch B B"], alpha: float) -> Float[Array, "*batch"]:
    density = _unit_trace(K)
    if alpha == 2:
        return -jnp.log(jnp.sum(density**2, (-2, -1)))
    weights = jnp.maximum(symmetric_eigenvalues(density), 0)
    return _renyi(weights / jnp.sum(weights, -1, keepdims=True), alpha)


def _unit_trace(K: Float[Array, "*batch B B"]) -> Float[Array, "*batch B B"]:
    """`K / tr K`; first by the greatest diagonal element, so that not even the trace can overflow."""
    diagonal = jnp.diagonal(K, axis1=-2, axis2=-1)
    greatest = jax.lax.stop_gradient(jnp.max(diagonal, -1, keepdims=True))
    trace = jnp.sum(diagonal / greatest, -1)  # of the diagonal alone, so that the division is one pass over K
    return K / greatest[..., None] / trace[..., None, None]


def _renyi(p: Float[Array, "*batch B"], alpha: float) -> Float[Array, "*batch"]:
    """Rényi entropy of probability vectors; every form has finite gradients where some `p_i = 0`."""
    if alpha > 1e18:  # within log(B) / α of the limit
        return -jnp.log(jnp.max(p, -1))
    # The inner `where` keeps log(0) out of the gradient. `p == 0` and not `p > 0`: NaN has to stay NaN.
    zero = p == 0
    log_p = jnp.log(jnp.where(zero, 1, p))
    if alpha == 1:
        return -jnp.sum(p * log_p, -1)
    if abs(alpha - 1) < 0.25:  # log Σ p^α = log(1 + Σ p (p^(α-1) - 1)), without the cancellation
        return -jnp.log1p(jnp.sum(p * jnp.expm1((alpha - 1) * log_p), -1)) / (alpha - 1)
    # Powers relative to the greatest p, so that p^α cannot underflow.
    peak = jnp.max(log_p - jnp.where(zero, jnp.inf, 0), -1, keepdims=True)
    powers = jnp.where(zero, 0, jnp.exp(alpha * (log_p - peak)))
    return (alpha * peak[..., 0] + jnp.log(jnp.sum(powers, -1))) / (1 - alpha)


def set_entropy(
    K: Float[AnyArray, "N B B"], sets: Int[AnyArray, "M m"], alpha: int | float = 1.0, *, chunk: int = 512
) -> Float[AnyArray, " M"]:
    """Entropy `S_α` in nats of the concatenated layers of each set, from the Grams of the `N` layers alone.

    The Gram of a concatenation is the sum of the Grams. Sets stream in chunks, so memory does not grow with `M`.
    The order of layers within a set does not matter, and equal sets of one call score bitwise equal. `alpha` and
    dtypes as in `matrix_entropy`. To let every layer weigh the same, divide each Gram by its trace first.

    Raises `LayerwaveError` for an empty set, a chunk of fewer than 1 set and, where sets are not traced, for a layer
    out of range or repeated in a set.

    Source: the paper (arXiv 2610.12939), eq. 4-6, on concatenated layers.
    """
    _check_alpha(alpha, K)
    check_sets(sets, K.shape[0])
    if chunk < 1:
        raise LayerwaveError(f"chunk={chunk}: expected at least 1 set a chunk")
    return _set_entropy(K, sets, alpha=float(alpha), chunk=chunk)


@numpy_in_float64
def _set_entropy(
    K: Float[AnyArray, "N B B"], sets: Int[AnyArray, "M m"], *, alpha: float, chunk: int
) -> Float[AnyArray, " M"]:
    return _stream_sets(widen(K), sets, alpha, chunk)


@partial(jax.jit, static_argnames=("alpha", "chunk"))
def _stream_sets(K: Float[Array, "N B B"], sets: Int[Array, "M m"], alpha: float, chunk: int) -> Float[Array, " M"]:
    return map_sets(partial(_gram_entropy, alpha=alpha), K, sets, chunk)


def _check_alpha(alpha: int | float, K: AnyArray) -> None:
    if not alpha > 0:
        raise LayerwaveError(f"alpha={alpha}: expected a number greater than 0, or math.inf")
    if alpha < 1 and K.dtype != np.float64:
        raise LayerwaveError(
            f"alpha={alpha} with a {K.dtype} Gram: orders below 1 need a float64 Gram; "
            "give gram(numpy.asarray(states, numpy.float64))"
        )
