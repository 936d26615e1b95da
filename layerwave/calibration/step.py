"""What happens to one batch on the device: forward pass, token entropies, filter, sinks, blocks, drawn positions.

One jitted call for each length bucket. The sums stay on the device until the end; what leaves with a batch is a few
numbers a sample, and the states at the positions that were drawn.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from layerwave.calibration.settings import POOLS
from layerwave.kernels import block_matrix, gram, matrix_entropy, sink_mask, token_entropy, top_fraction
from layerwave.targets.mesh import each_device, spread


class Sums(NamedTuple):
    """What stays on the device: sums of blocks of every layer, float32.

    pools: of all samples, one for each of `POOLS`.
    replicates: of the chosen pool, each sample times its weight in each of C accumulators (`sample_weights`).
    """

    pools: Float32[Array, "N P B D"]
    replicates: Float32[Array, "N C B D"]

    @classmethod
    def zeros(cls, num_layers: int, accumulators: int, block: int, features: int) -> "Sums":
        return cls(*(jnp.zeros((num_layers, number, block, features)) for number in (len(POOLS), accumulators)))


class BatchResult(NamedTuple):
    """What leaves the device with a batch of `b` samples; P pools, N layers.

    curves: S_1 in nats of each sample's own block mean, NaN where it gave no block.
    kept: tokens that the pool kept.
    gap: between the entropies, in nats, of the last token that the filter keeps and the first that it does not;
        infinite where it keeps all.
    sinks: attention sinks among all tokens of a sample.
    largest: greatest norm of a token's state in each layer, NaN when one is not finite.
    finite: whether the next-token entropies of all tokens are, and so final-normed states and head.
    """

    curves: Float32[Array, "P b N"]
    kept: Int32[Array, "P b"]
    gap: Float32[Array, " b"]
    sinks: Int32[Array, " b"]
    largest: Float32[Array, " N"]
    finite: Bool[Array, ""]


class DrawnStates(NamedTuple):
    """What leaves with a batch of its K drawn positions t, in the dtype of the token sample (see `TokenSample`)."""

    states: Float[Array, "N K W"]
    normed: Float[Array, "K D"]
    """At t + 1, as the next-token entropies."""
    entropy: Float32[Array, " K"]
    sinks: Bool[Array, " K"]


@partial(jax.jit, static_argnames=("graphdef", "rho", "post_norm", "sink_multiple", "dtype"), donate_argnames="sums")
def batch_step(
    graphdef: Any,
    params: Any,
    sums: Sums,
    tokens: Int32[Array, "b T"],
    lengths: Int32[Array, " b"],
    weights: Float32[Array, "C b"],
    chosen: int | Int32[Array, ""],
    where: Int32[Array, "2 K"],
    projection: Float32[Array, "D W"] | None,
    *,
    rho: float,
    post_norm: bool,
    sink_multiple: float,
    dtype: DTypeLike,
) -> tuple[Sums, BatchResult, DrawnStates]:
    """Forward pass of one batch; adds its blocks to `sums`.

    `chosen` is the pool of the replicates; `where` holds row and position of the drawn positions, whose states are
    projected, if at all, and rounded to `dtype`.
    """
    decoder = nnx.merge(graphdef, params)
    out = decoder(tokens, lengths=lengths)
    states = spread(out.states.at[-1].set(out.normed) if post_norm else out.states)
    entropy = token_entropy(out.normed.reshape(-1, out.normed.shape[-1]), decoder.head_weight()).reshape(tokens.shape)
    sums, result, sinks = reduce_states(
        sums, states, entropy, lengths, weights, chosen, rho=rho, sink_multiple=sink_multiple
    )
    return sums, result, drawn_states(states, out.normed, entropy, sinks, where, projection, dtype)


def reduce_states(
    sums: Sums,
    states: Float[Array, "N b T D"],
    entropy: Float32[Array, "b T"],
    lengths: Int32[Array, " b"],
    weights: Float32[Array, "C b"],
    chosen: int | Int32[Array, ""],
    *,
    rho: float,
    sink_multiple: float,
) -> tuple[Sums, BatchResult, Bool[Array, "b T"]]:
    """Filter, sinks and blocks of one batch; with the result, which tokens are sinks."""
    valid = jnp.arange(states.shape[2], dtype=jnp.int32)[None, :] < lengths[:, None]
    norms = jnp.sqrt(jnp.sum(jnp.square(states.astype(jnp.float32)), axis=-1))  # (N, b, T)
    keep, sinks, gap = jax.vmap(partial(pool_masks, rho=rho, sink_multiple=sink_multiple), in_axes=(0, 1, 0))(
        entropy, norms, valid
    )
    sums, curves = pool_states(sums, states, keep, weights, chosen)
    result = BatchResult(
        curves=curves,
        kept=jnp.sum(keep, axis=-1, dtype=jnp.int32).T,
        gap=gap,
        sinks=jnp.sum(sinks, axis=-1, dtype=jnp.int32),
        largest=jnp.where(
            jnp.all(jnp.isfinite(norms) | ~valid[None], axis=(1, 2)),  # XLA's max may pass over NaN
            jnp.max(norms, axis=(1, 2), where=valid[None], initial=0.0),
            jnp.nan,
        ),
        finite=jnp.all(jnp.isfinite(entropy) | ~valid),
    )
    return sums, result, sinks


states_step = jax.jit(reduce_states, static_argnames=("rho", "sink_multiple"), donate_argnames="sums")
"""What `batch_step` does after the forward pass, for states and next-token entropies that are given."""


def pool_masks(
    entropy: Float[Array, " T"],
    norms: Float[Array, "N T"],
    valid: Bool[Array, " T"],
    *,
    rho: float,
    sink_multiple: float,
) -> tuple[Bool[Array, "P T"], Bool[Array, " T"], Float32[Array, ""]]:
    """The tokens of one sample that each of the four `POOLS` keeps, its attention sinks, and `BatchResult.gap`."""
    filtered = top_fraction(entropy, valid, rho)
    sinks = sink_mask(norms, valid, sink_multiple)
    least = jnp.min(entropy, where=filtered, initial=jnp.inf)
    gap = least - jnp.max(entropy, where=valid & ~filtered, initial=-jnp.inf)
    return jnp.stack([filtered, filtered & ~sinks, valid, valid & ~sinks]), sinks, gap.astype(jnp.float32)


def pool_states(
    sums: Sums,
    states: Float[Array, "N b T D"],
    keep: Bool[Array, "b P T"],
    weights: Float32[Array, "C b"],
    chosen: int | Int32[Array, ""],
) -> tuple[Sums, Float32[Array, "P b N"]]:
    """Adds every sample's blocks to `sums`; gives S_1 of each sample's own block mean (paper, eq. 4-6, 11).

    Layers go through one by one, so that no copy of all states is made. Sums are float32 whatever the states.
    """
    block = sums.pools.shape[2]
    P, blocks = jax.vmap(jax.vmap(partial(block_matrix, block=block)))(keep)  # (b, P, B, T), (b, P)
    used = jnp.any(P, axis=(1, 2))[:, :, None]  # (b, T, 1)

    def layer(sums: Sums, xs: tuple[Int32[Array, ""], Float[Array, "b T D"]]) -> tuple[Sums, Float32[Array, "b P B B"]]:
        index, layer_states = xs
        finite = jnp.where(used, layer_states.astype(jnp.float32), 0)  # 0 x NaN of padding would be NaN
        own = jnp.einsum("bpkt,btd->bpkd", P, finite, precision=jax.lax.Precision.HIGHEST)
        mean = own / jnp.maximum(blocks, 1).astype(jnp.float32)[:, :, None, None]
        weighted = jnp.einsum("cb,bkd->ckd", weights, own[:, chosen], precision=jax.lax.Precision.HIGHEST)
        # The sums are carried, and not stacked anew, so that they are added to in place.
        added = Sums(sums.pools.at[index].add(jnp.sum(own, axis=0)), sums.replicates.at[index].add(weighted))
        return Sums(*map(spread, added)), gram(mean)

    sums, grams = jax.lax.scan(layer, sums, (jnp.arange(len(states), dtype=jnp.int32), states))
    grams = jnp.transpose(grams, (2, 1, 0, 3, 4))  # (P, b, N, B, B)
    empty = (blocks.T == 0)[:, :, None]
    identity = jnp.eye(block, dtype=jnp.float32)[None, None, None]
    curves = each_device(matrix_entropy)(jnp.where(empty[..., None, None], identity, grams))
    return sums, jnp.where(empty, jnp.nan, curves)


def drawn_states(
    states: Float[Array, "N b T D"],
    normed: Float[Array, "b T D"],
    entropy: Float32[Array, "b T"],
    sinks: Bool[Array, "b T"],
    where: Int32[Array, "2 K"],
    projection: Float32[Array, "D W"] | None,
    dtype: DTypeLike,
) -> DrawnStates:
    """States and sinks at the drawn positions t; final-normed states and entropies at t + 1."""
    row, position = where
    drawn = states[:, row, position]
    if projection is not None:
        drawn = jnp.matmul(drawn.astype(jnp.float32), projection[None], precision=jax.lax.Precision.HIGHEST)
    following = normed[row, position + 1].astype(dtype), entropy[row, position + 1]
    return DrawnStates(drawn.astype(dtype), *following, sinks[row, position])
