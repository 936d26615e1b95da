"""One streamed pass: batches of tokens in, block sums of every layer and per-sample curves out.

A batch is one jitted call for each length bucket: forward pass, token entropies, filter, sinks, blocks. The
sums stay on the device until the end; what leaves with a batch is a few numbers a sample.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

from layerwave.calibration.artifact import POOLS, Calibration, check_layers
from layerwave.calibration.conversations import Conversations, read_conversations
from layerwave.calibration.replicates import Replicates, sample_weights
from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.tokens import Batch, Samples, batches, draw_samples
from layerwave.errors import LayerwaveError
from layerwave.kernels import block_matrix, gram, matrix_entropy, sink_mask, token_entropy, top_fraction
from layerwave.targets import Target

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, int], None]
"""Called after each batch with samples done, samples in all, and tokens done."""


class Sums(NamedTuple):
    """What stays on the device: sums of blocks of every layer, float32.

    pools: of all samples, one for each of `POOLS`.
    replicates: of the chosen pool, each sample times its weight in each of C accumulators (`sample_weights`).
    """

    pools: Float32[Array, "N P B D"]
    replicates: Float32[Array, "N C B D"]


class BatchResult(NamedTuple):
    """What leaves the device with a batch of `b` samples; P pools, N layers.

    curves: S_1 in nats of each sample's own block mean, NaN where it gave no block.
    kept: tokens that the pool kept.
    sinks: attention sinks among all tokens of a sample.
    largest: greatest norm of a token's state in each layer, NaN when one is not finite.
    """

    curves: Float32[Array, "P b N"]
    kept: Int32[Array, "P b"]
    sinks: Int32[Array, " b"]
    largest: Float32[Array, " N"]


def calibrate(
    target: Target,
    conversations: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
    settings: CalibrationSettings | None = None,
    *,
    batch_tokens: int = 2048,
    progress: Progress | None = None,
    **changes: Any,
) -> Calibration:
    """Runs the target over conversations once and keeps the block sums of every layer (paper, eq. 9-11).

    Args:
        target: what `load_target` returned.
        conversations: a path, a list of rows, or what `read_conversations` returned.
        settings: by default the paper's; `changes` replace single fields, as in `rho=1.0, block=16`.
        batch_tokens: tokens, padding included, in a batch; changes memory and speed, not the result.
        progress: called after each batch.

    `max_length` is lowered to the positions that the target has, and recorded so. The tallies count the rows
    read, not drawn and dropped, and the compilations (at most one a length bucket).

    Raises:
        LayerwaveError: unusable settings, conversations or tokenizer (see `read_conversations` and
            `draw_samples`), no block in the chosen pool, states not finite or all zero (the layer is named).
    """
    settings = replace(settings or CalibrationSettings(), **_known(changes))
    if settings.max_length > target.config.max_positions:
        logger.info("max_length %d lowered to the target's positions", settings.max_length)
        settings = replace(settings, max_length=target.config.max_positions)
    samples = draw_samples(target.tokenizer, target.config.vocab_size, read_conversations(conversations), settings)
    plan = list(batches(samples.ids, settings.max_length, batch_tokens))
    shapes = sorted({batch.tokens.shape for batch in plan})
    logger.info("%d samples in %d batches of shapes %s", len(samples.ids), len(plan), shapes)
    weights = sample_weights(samples.fingerprints, settings.replicates, settings.seed)
    results, sums = _run(target, settings, plan, weights, progress)
    calibration = _assemble(target, settings, samples, plan, results, sums, compilations=len(shapes))
    _require_blocks(calibration)
    return calibration


def _run(
    target: Target,
    settings: CalibrationSettings,
    plan: list[Batch],
    weights: UInt8[np.ndarray, "C S"],
    progress: Progress | None,
) -> tuple[list[BatchResult], Sums]:
    """Sends every batch through the device; collects one batch late: the device never waits."""
    graphdef, params = nnx.split(target.decoder)
    config = target.config
    zeros = [
        jnp.zeros((config.num_layers, number, settings.block, config.hidden_size))
        for number in (len(POOLS), len(weights))
    ]
    sums = Sums(*zeros)
    results: list[BatchResult] = []

    def collect(result: BatchResult) -> None:
        results.append(jax.device_get(result))
        check_layers(results[-1].largest)
        if progress is not None:
            finished = plan[: len(results)]
            progress(
                sum(len(batch.samples) for batch in finished),
                sum(len(batch.samples) for batch in plan),
                sum(int(batch.lengths.sum()) for batch in finished),
            )

    in_flight: BatchResult | None = None
    for batch in plan:
        sums, result = batch_step(
            graphdef,
            params,
            sums,
            batch.tokens,
            batch.lengths,
            _rows_of(batch, weights),
            POOLS.index(("filtered", settings.sinks)),
            rho=settings.rho,
            post_norm=settings.final_state == "post_norm",
            sink_multiple=settings.sink_multiple,
        )
        if in_flight is not None:
            collect(in_flight)
        in_flight = result
    collect(in_flight)
    return results, sums


def _rows_of(batch: Batch, weights: UInt8[np.ndarray, "C S"]) -> Float32[np.ndarray, "C b"]:
    """The weights of a batch's samples; 0 for rows that are all padding."""
    rows = np.zeros((len(weights), len(batch.tokens)), np.float32)
    rows[:, : len(batch.samples)] = weights[:, list(batch.samples)]
    return rows


@partial(jax.jit, static_argnames=("graphdef", "rho", "post_norm", "sink_multiple"), donate_argnames="sums")
def batch_step(
    graphdef: Any,
    params: Any,
    sums: Sums,
    tokens: Int32[Array, "b T"],
    lengths: Int32[Array, " b"],
    weights: Float32[Array, "C b"],
    chosen: int | Int32[Array, ""],
    *,
    rho: float,
    post_norm: bool,
    sink_multiple: float,
) -> tuple[Sums, BatchResult]:
    """Forward pass of one batch; adds its blocks to `sums`. `chosen` is the pool of the replicates."""
    decoder = nnx.merge(graphdef, params)
    out = decoder(tokens)
    states = out.states.at[-1].set(out.normed) if post_norm else out.states
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    norms = jnp.sqrt(jnp.sum(jnp.square(states.astype(jnp.float32)), axis=-1))  # (N, b, T)
    entropy = token_entropy(out.normed.reshape(-1, out.normed.shape[-1]), decoder.head_weight())
    keep, sinks = jax.vmap(partial(pool_masks, rho=rho, sink_multiple=sink_multiple), in_axes=(0, 1, 0))(
        entropy.reshape(valid.shape), norms, valid
    )
    sums, curves = pool_states(sums, states, keep, weights, chosen)
    return sums, BatchResult(
        curves=curves,
        kept=jnp.sum(keep, axis=-1, dtype=jnp.int32).T,
        sinks=jnp.sum(sinks, axis=-1, dtype=jnp.int32),
        largest=jnp.where(
            jnp.all(jnp.isfinite(norms) | ~valid[None], axis=(1, 2)),  # XLA's max may pass over NaN
            jnp.max(norms, axis=(1, 2), where=valid[None], initial=0.0),
            jnp.nan,
        ),
    )


def pool_masks(
    entropy: Float[Array, " T"],
    norms: Float[Array, "N T"],
    valid: Bool[Array, " T"],
    *,
    rho: float,
    sink_multiple: float,
) -> tuple[Bool[Array, "P T"], Bool[Array, " T"]]:
    """The tokens of one sample that each of the four `POOLS` keeps, and its attention sinks."""
    filtered = top_fraction(entropy, valid, rho)
    sinks = sink_mask(norms, valid, sink_multiple)
    return jnp.stack([filtered, filtered & ~sinks, valid, valid & ~sinks]), sinks


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
        return added, gram(mean)

    sums, grams = jax.lax.scan(layer, sums, (jnp.arange(len(states), dtype=jnp.int32), states))
    grams = jnp.transpose(grams, (2, 1, 0, 3, 4))  # (P, b, N, B, B)
    empty = (blocks.T == 0)[:, :, None]
    identity = jnp.eye(block, dtype=jnp.float32)[None, None, None]
    curves = matrix_entropy(jnp.where(empty[..., None, None], identity, grams))
    return sums, jnp.where(empty, jnp.nan, curves)


def _assemble(
    target: Target,
    settings: CalibrationSettings,
    samples: Samples,
    plan: list[Batch],
    results: list[BatchResult],
    sums: Sums,
    *,
    compilations: int,
) -> Calibration:
    """Puts the samples of all batches into the order of their fingerprints."""
    seen = np.array([index for batch in plan for index in batch.samples])
    order = np.argsort(samples.fingerprints[seen])

    def gather(name: str) -> np.ndarray:
        rows = [getattr(result, name) for result in results]
        real = [row[..., : len(batch.samples)] for row, batch in zip(rows, plan, strict=True)]
        return np.concatenate(real, axis=-1).astype(np.int64)[..., order]

    curves = [result.curves[:, : len(batch.samples)] for result, batch in zip(results, plan, strict=True)]
    kept = gather("kept")
    replicates = None
    if settings.replicates:
        replicates = Replicates.from_sums(np.swapaxes(np.asarray(sums.replicates), 0, 1), settings.replicate_megabytes)
    return Calibration(
        sums=np.ascontiguousarray(np.swapaxes(np.asarray(sums.pools), 0, 1)),
        counts=(kept // settings.block).sum(axis=1),
        curves=np.concatenate(curves, axis=1)[:, order],
        kept=kept,
        lengths=np.array([len(samples.ids[index]) for index in seen[order]], np.int64),
        sinks=gather("sinks"),
        fingerprints=samples.fingerprints[seen[order]],
        settings=settings,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        target_dtype=str(target.decoder.dtype),
        tallies=samples.tallies | {"compilations": compilations},
        replicates=replicates,
    )


def _require_blocks(calibration: Calibration) -> None:
    settings = calibration.settings
    pool = POOLS.index(("filtered", settings.sinks))
    if calibration.counts[pool] == 0:
        raise LayerwaveError(
            f"no sample kept a block of {settings.block} tokens: of {calibration.lengths.max()} tokens of the "
            f"longest of {len(calibration.lengths)}, rho={settings.rho:g} and sinks={settings.sinks!r} kept "
            f"at most {calibration.kept[pool].max()}: give longer conversations, a smaller block or a larger rho"
        )


def _known(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuses keyword arguments that are not settings."""
    known = asdict(CalibrationSettings())
    for name in changes:
        if name not in known:
            raise LayerwaveError(f"unknown setting {name!r}, expected one of {', '.join(known)}: rename it")
    return changes
