"""Soft cross-entropy with its gradient written out, and the greatest of many logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


@jax.custom_vjp
def soft_cross_entropy(
    logits: Float32[Array, "*n V"], probabilities: Float32[Array, "*n V"]
) -> tuple[Float32[Array, "*n"], Float32[Array, "*n V"]]:
    """`-Σ p log q` in nats and `q = softmax(logits)`. `p` sums to 1.

    The loss is differentiable in the logits, `q - p`; that of `q` and `p` is 0. Autodiff would go over the `V` numbers
    of a token three times more.
    """
    return _forward(logits, probabilities)[0]


def _forward(logits, probabilities):
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    q = weights / total
    # Where p is 0 so is p log q; a p that is NaN stays. (XLA's plain sum is slow on a CPU when drafts are vmapped.)
    products = jnp.where(probabilities == 0, 0.0, probabilities * shifted)
    loss = jnp.log(total[..., 0]) - jnp.sum(products, axis=-1)
    return (loss, q), (q, probabilities)


def _backward(kept, cotangents):
    q, probabilities = kept
    return cotangents[0][..., None] * (q - probabilities), None


soft_cross_entropy.defvjp(_forward, _backward)


def first_greatest(x: Float32[Array, "*n V"]) -> Int32[Array, "*n"]:
    """`argmax` along the last axis, as two reductions that a CPU vectorises (XLA's argmax is not).

    A row with NaN gives its last place.
    """
    places = jnp.arange(x.shape[-1], dtype=jnp.int32)
    found = jnp.where(x == jnp.max(x, axis=-1, keepdims=True), places, x.shape[-1] - 1)
    return jnp.min(found, axis=-1)
