"""Which tokens of a sample are kept: next-token entropy, its top fraction, and attention sinks."""

import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from layerwave.errors import LayerwaveError
from layerwave.kernels.precision import AnyArray


def token_entropy(
    normed: Float[AnyArray, "T D"], head: Float[AnyArray, "V D"], *, chunk: int = 128
) -> Float[Array, " T"]:
    """Entropy in nats of the target's next-token distribution at every position, float32.

    `normed` is the last state after the final norm, `head` the output head. Logits of all positions never exist at
    once: positions go through in chunks, and on a CPU, whose caches are small, the vocabulary does.

    Raises `LayerwaveError` for `chunk < 1`.

    Source: the paper (arXiv 2610.12939), eq. 9.
    """
    if chunk < 1:
        raise LayerwaveError(f"chunk={chunk}: expected at least 1 position a chunk")
    return _token_entropy(normed, head, chunk)


@partial(jax.jit, static_argnames="chunk")
def _token_entropy(normed: Float[Array, "T D"], head: Float[Array, "V D"], chunk: int) -> Float[Array, " T"]:
    common = head.dtype if normed.dtype == head.dtype else jnp.float32
    by_positions = partial(entropy_by_positions, chunk=chunk)
    return jax.lax.platform_dependent(
        normed.astype(common), head.astype(common), cpu=entropy_by_vocabulary, default=by_positions
    )


def _logits(normed: Float[Array, "T D"], head: Float[Array, "V D"]) -> Float[Array, "V T"]:
    """Positions last: what sums over the vocabulary then goes through memory in its order."""
    return jnp.dot(head, normed.T, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def entropy_by_positions(normed: Float[Array, "T D"], head: Float[Array, "V D"], *, chunk: int) -> Float[Array, " T"]:
    """`-Σ p log p` of `p = softmax(logits)`, `chunk` positions at a time with the whole vocabulary."""

    def entropy(state: Float[Array, " D"]) -> Float[Array, ""]:
        logits = _logits(state[None], head)[:, 0]
        total, moment = _moments(logits, jnp.max(logits))
        return jnp.log(total) - moment / total

    return jax.lax.map(entropy, normed, batch_size=chunk)


def entropy_by_vocabulary(
    normed: Float[Array, "T D"], head: Float[Array, "V D"], *, chunk: int = 512
) -> Float[Array, " T"]:
    """The same, `chunk` tokens of the vocabulary at a time with all positions.

    Carried are the greatest logit so far, and both moments relative to it, which are rescaled when it grows.
    """

    def add(carried: tuple[Array, Array, Array], rows: Float[Array, "v D"]) -> tuple[Array, Array, Array]:
        greatest, total, moment = carried
        logits = _logits(normed, rows)
        new = jnp.maximum(greatest, jnp.max(logits, axis=0))
        more, more_moment = _moments(logits, new)
        growth = greatest - new
        scale = jnp.exp(growth)
        return new, scale * total + more, scale * (moment + growth * total) + more_moment

    zero = jnp.zeros(len(normed), jnp.float32)
    chunk = min(chunk, len(head))
    whole = len(head) // chunk
    carried = jax.lax.fori_loop(
        0,
        whole,
        lambda i, carried: add(carried, jax.lax.dynamic_slice_in_dim(head, i * chunk, chunk)),
        (zero + jnp.finfo(jnp.float32).min, zero, zero),
    )
    if len(head) % chunk:
        carried = add(carried, head[whole * chunk :])
    _, total, moment = carried
    return jnp.log(total) - moment / total


def _moments(logits: Float[Array, "V *T"], greatest: Float[Array, "*T"]) -> tuple[Array, Array]:
    """`Σ exp(x - x_max)` and `Σ exp(x - x_max) (x - x_max)` over the vocabulary; a logit of -inf adds nothing."""
    shifted = logits - greatest[None]
    weights = jnp.exp(shifted)
    return jnp.sum(weights, axis=0), jnp.sum(weights * jnp.where(weights == 0, 0, shifted), axis=0)


def top_fraction(entropy: Float[AnyArray, " T"], valid: Bool[AnyArray, " T"], rho: int | float) -> Bool[Array, " T"]:
    """Mask of the `k = max(1, ceil(ρ n))` of the `n` valid positions with the greatest entropy.

    Ties go to the earlier position; invalid positions (padding) are neither counted nor kept. `rho` is static, and
    read as the decimal number that it prints as: of 100 positions 0.07 keeps 7.

    Raises `LayerwaveError` unless `0 < rho <= 1`.

    Source: the paper (arXiv 2610.12939), eq. 10.
    """
    if not 0 < rho <= 1:
        raise LayerwaveError(f"rho={rho}: expected a fraction greater than 0 and at most 1")
    return _top_fraction(entropy, valid, rho)


@partial(jax.jit, static_argnames="rho")
def _top_fraction(entropy: Float[Array, " T"], valid: Bool[Array, " T"], rho: int | float) -> Bool[Array, " T"]:
    T = len(entropy)
    order = jnp.lexsort((-entropy, ~valid))  # stable; the last key, valid first, leads
    rank = jnp.zeros(T, jnp.int32).at[order].set(jnp.arange(T, dtype=jnp.int32))
    return valid & (rank < jnp.asarray(kept_counts(T, rho))[jnp.sum(valid)])


def kept_counts(longest: int, rho: int | float) -> Int[np.ndarray, " {longest}+1"]:
    """`max(1, ceil(ρ n))` for `n = 0 … longest`, by exact arithmetic: in floats `0.07 * 100` is more than 7."""
    exact = Fraction(str(rho))
    return np.array([max(1, math.ceil(exact * n)) for n in range(longest + 1)], np.int32)


def sink_mask(
    norms: Float[AnyArray, "N T"], valid: Bool[AnyArray, " T"], multiple: int | float = 10.0
) -> Bool[Array, " T"]:
    """Mask of attention sinks: valid positions whose norm in any layer exceeds `multiple` times that layer's median.

    `norms` are the lengths of the states; the median is over valid positions (of an even number, the mean of the
    middle two). `multiple` is static.

    Raises `LayerwaveError` unless `multiple > 0`.

    Source: ours. Massive norms at single tokens, mostly the first, make much of the entropy wave.
    """
    if not multiple > 0:
        raise LayerwaveError(f"multiple={multiple}: expected a number greater than 0")
    return _sink_mask(norms, valid, float(multiple))


@partial(jax.jit, static_argnames="multiple")
def _sink_mask(norms: Float[Array, "N T"], valid: Bool[Array, " T"], multiple: float) -> Bool[Array, " T"]:
    n = jnp.sum(valid)
    ascending = jnp.sort(jnp.where(valid[None], norms, jnp.inf), axis=1)
    median = (ascending[:, (n - 1) // 2] + ascending[:, n // 2]) / 2
    return valid & jnp.any(norms > multiple * median[:, None], 0)
