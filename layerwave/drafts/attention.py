"""Attention of the training-time test, with its gradient written out.

What autodiff makes of a softmax sums over each `T x T` block of products once more, and transposes it. Here the
backward pass takes that sum from the output (FlashAttention, arXiv 2205.14135, appendix B.2), vectors are normalised
instead of blocks, and products are ordered so that each block is used as it lies.

Letters: `b` rows, `t` queries' slots, `s` keys' slots, `j` steps, `k` key heads, `g` query heads to each of them, `m`
the queries of a key head (`g t`), `d` features of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

product = partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def attend_unrolled(
    q_bthd: Float[Array, "b T H head_dim"],
    keys: Float[Array, "J b T K head_dim"],
    values: Float[Array, "J b T K head_dim"],
    mask_bts: Bool[Array, "b T T"],
    step: Int[Array, ""],
) -> Float[Array, "b T H head_dim"]:
    """Softmax attention over the slots of step 0 that the mask shows, and over the own slot of steps 1 … `step`.

    One softmax over the union, without a `T x JT` array: later steps bring one score a query. Scores and softmax are
    float32. Differentiable in queries, keys and values.
    """
    return _attend(q_bthd, keys, values, mask_bts, step)[0]


def _by_key_head(x_bthd: Float[Array, "b T H d"], key_heads: int) -> Float[Array, "b K G T d"]:
    batch, length, _, head_dim = x_bthd.shape
    return jnp.transpose(x_bthd.reshape(batch, length, key_heads, -1, head_dim), (0, 2, 3, 1, 4))


def _by_slot(x_bkgtd: Float[Array, "b K G T d"]) -> Float[Array, "b T H d"]:
    batch, key_heads, group, length, head_dim = x_bkgtd.shape
    return jnp.transpose(x_bkgtd, (0, 3, 1, 2, 4)).reshape(batch, length, key_heads * group, head_dim)


def _merged(x_bkgt: Float[Array, "b K G T n"]) -> Float[Array, "b K GT n"]:
    return x_bkgt.reshape(*x_bkgt.shape[:2], -1, x_bkgt.shape[-1])


def _attend(q_bthd, keys, values, mask_bts, step):
    head_dim, lowest = q_bthd.shape[-1], jnp.finfo(jnp.float32).min
    q_bkgtd = _by_key_head(q_bthd / head_dim**0.5, keys.shape[3])
    scores = product("bkmd,bskd->bkms", _merged(q_bkgtd), keys[0]).reshape(*q_bkgtd.shape[:4], -1)
    verified = jnp.where(mask_bts[:, None, None], scores, lowest)
    seen = (jnp.arange(1, len(keys), dtype=jnp.int32) <= step)[None, None, None, None]
    own = jnp.where(seen, product("bkgtd,jbtkd->bkgtj", q_bkgtd, keys[1:]), lowest)
    greatest = jnp.maximum(
        jnp.max(verified, axis=-1, keepdims=True), jnp.max(own, axis=-1, keepdims=True, initial=lowest)
    )
    verified, own = jnp.exp(verified - greatest), jnp.exp(own - greatest)
    total = jnp.sum(verified, axis=-1, keepdims=True) + jnp.sum(own, axis=-1, keepdims=True)
    verified, own = verified.astype(q_bthd.dtype), own.astype(q_bthd.dtype)
    mixed = product("bkms,bskd->bkmd", _merged(verified), values[0]).reshape(q_bkgtd.shape)
    mixed = (mixed + product("bkgtj,jbtkd->bkgtd", own, values[1:])) / total
    return _by_slot(mixed).astype(q_bthd.dtype), (q_bkgtd, keys, values, verified, own, total, mixed)


def _backward(kept, d_out):
    """With `o = Σ e v / total` and `u = do / total`: `dv = Σ e u`, and the scores' gradient is `e (u·v - u·o)`."""
    q_bkgtd, keys, values, verified, own, total, mixed = kept
    dtype, shape = q_bkgtd.dtype, q_bkgtd.shape
    u = _by_key_head(d_out, shape[1]).astype(jnp.float32) / total
    shared = jnp.sum(u * mixed, axis=-1, keepdims=True)
    u = u.astype(dtype)
    through = product("bkmd,bskd->bkms", _merged(u), values[0]).reshape(verified.shape)
    through_own = product("bkgtd,jbtkd->bkgtj", u, values[1:])
    d_verified, d_own = (
        (weights.astype(jnp.float32) * (found - shared)).astype(dtype)
        for weights, found in ((verified, through), (own, through_own))
    )

    d_q = product("bkms,bskd->bkmd", _merged(d_verified), keys[0]).reshape(shape)
    d_q = (d_q + product("bkgtj,jbtkd->bkgtd", d_own, keys[1:])) * shape[-1] ** -0.5

    def of_slots(rows, blocks, chain):
        """`Σ` over the queries of rows times blocks (step 0) and times the own slots' numbers (later steps)."""
        first = product("bkmd,bkms->bkds", _merged(rows), _merged(blocks))
        later = product("bkgtd,bkgtj->jbtkd", rows, chain)
        return jnp.concatenate([jnp.transpose(first, (0, 3, 1, 2))[None], later]).astype(dtype)

    return _by_slot(d_q).astype(dtype), of_slots(q_bkgtd, d_verified, d_own), of_slots(u, verified, own), None, None


attend_unrolled.defvjp(_attend, _backward)
