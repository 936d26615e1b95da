"""One streamed pass: batches of tokens in, block sums of every layer, per-sample curves and a token sample out.

The host's side of it: what goes into each batch, and what is made of all of them (step.py is the device's).
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32, UInt8

from layerwave.calibration.artifact import POOLS, Calibration, check_layers
from layerwave.calibration.conversations import Conversations, read_conversations
from layerwave.calibration.plan import SHARE_TOKENS
from layerwave.calibration.replicates import Replicates, sample_weights
from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.sharded_step import empty_sums, sharded_step, total
from layerwave.calibration.step import BatchResult, DrawnStates, Sums, batch_step
from layerwave.calibration.token_gather import Gathering, warn_of_sides
from layerwave.calibration.tokens import Batch, Samples, batches, draw_samples
from layerwave.errors import LayerwaveError
from layerwave.targets import Target
from layerwave.targets.mesh import shares

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, int], None]
"""Called after each batch with samples done, samples in all, and tokens done."""


def calibrate(
    target: Target,
    conversations: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
    settings: CalibrationSettings | None = None,
    *,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> Calibration:
    """Runs the target over conversations once; keeps block sums of every layer (paper, eq. 9-11) and a token sample.

    Args:
        target: what `load_target` returned.
        conversations: a path, a list of rows, or what `read_conversations` returned.
        settings: by default the paper's; `changes` replace single fields, as in `rho=1.0, block=16`.
        batch_tokens: tokens, padding included, in a batch; changes memory and speed, not the result. By default 2,048
            for each share of the target's mesh.
        progress: called after each batch.

    `max_length` is lowered to the positions that the target has, and recorded so. The tallies count the rows
    read, not drawn and dropped, and the compilations (at most one a length bucket).

    Raises:
        LayerwaveError: unusable settings, conversations or tokenizer (see `read_conversations` and
            `draw_samples`), no block in the chosen pool, states not finite or all zero (the layer is named),
            next-token entropies not finite, or a token sample that does not fit into `token_megabytes`.
    """
    settings = replace(settings or CalibrationSettings(), **known(changes))
    work = Work.prepare(target, conversations, settings, batch_tokens)
    return work.checked(work.run(progress=progress))


@dataclass(frozen=True, eq=False)
class Work:
    """All that is known before the first batch: the samples, how they are cut into batches, and what is drawn of them.

    Any part of the batches can be run by itself, and the parts merge (`Calibration.merge`).
    """

    target: Target
    settings: CalibrationSettings
    samples: Samples
    plan: list[Batch]
    weights: UInt8[np.ndarray, "C S"]
    gathering: Gathering

    @classmethod
    def prepare(
        cls,
        target: Target,
        conversations: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
        settings: CalibrationSettings,
        batch_tokens: int | None,
    ) -> "Work":
        """Arguments and errors as in `calibrate`."""
        if settings.max_length > target.config.max_positions:
            logger.info("max_length %d lowered to the target's positions", settings.max_length)
            settings = replace(settings, max_length=target.config.max_positions)
        samples = draw_samples(target.tokenizer, target.config.vocab_size, read_conversations(conversations), settings)
        batch_tokens = shares(target.mesh) * SHARE_TOKENS if batch_tokens is None else batch_tokens
        plan = list(batches(samples.ids, settings.max_length, batch_tokens, shares(target.mesh)))
        weights = sample_weights(samples.fingerprints, settings.replicates, settings.seed)
        work = cls(target, settings, samples, plan, weights, Gathering.of(target, samples, plan, settings))
        logger.info("%d samples in %d batches of shapes %s", len(samples.ids), len(plan), work.shapes)
        return work

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return sorted({batch.tokens.shape for batch in self.plan})

    @property
    def tallies(self) -> dict[str, int]:
        return self.samples.tallies | {"compilations": len(self.shapes)}

    def run(self, part: slice = slice(None), progress: Progress | None = None) -> Calibration:
        """The calibration of a part of the batches; by default of all. It may hold no block."""
        plan, gathering, settings = self.plan[part], self.gathering.part(part), self.settings
        results, sums = _run(self.target, settings, plan, self.weights, gathering, progress)
        calibration = assemble(origin_of(self.target), settings, self.samples, plan, results, sums, self.tallies)
        return replace(
            calibration, tokens=gathering.finish(self.target, self.samples) if settings.token_sample else None
        )

    def checked(self, calibration: Calibration) -> Calibration:
        """The calibration of all batches, if it is one to be used; says what its token sample lacks."""
        require_blocks(calibration)
        if calibration.tokens is not None:
            warn_of_sides(calibration.tokens)
        return calibration


def _run(
    target: Target,
    settings: CalibrationSettings,
    plan: list[Batch],
    weights: UInt8[np.ndarray, "C S"],
    gathering: Gathering,
    progress: Progress | None,
) -> tuple[list[BatchResult], Sums]:
    """Sends every batch through the device; collects one batch late: the device never waits."""
    graphdef, params = nnx.split(target.decoder)
    config = target.config
    step = batch_step if target.mesh is None else partial(sharded_step, target.mesh)
    sums = empty_sums(target.mesh, config.num_layers, len(weights), settings.block, config.hidden_size)
    results: list[BatchResult] = []

    def collect(result: BatchResult, drawn: DrawnStates) -> None:
        gathering.put(len(results), jax.device_get(drawn))
        results.append(jax.device_get(result))
        check_layers(results[-1].largest)
        if not results[-1].finite:
            raise LayerwaveError(
                "the target's next-token entropies hold NaN or infinity, but must be finite: check final norm and "
                "head of the checkpoint, or load the target with dtype float32"
            )
        if progress is not None:
            finished = plan[: len(results)]
            progress(
                sum(len(batch.samples) for batch in finished),
                sum(len(batch.samples) for batch in plan),
                sum(int(batch.lengths.sum()) for batch in finished),
            )

    in_flight: list[Any] = []
    for batch, drawn in zip(plan, gathering.batches, strict=True):
        sums, *left = step(
            graphdef,
            params,
            sums,
            batch.tokens,
            batch.lengths,
            _rows_of(batch, weights),
            POOLS.index(("filtered", settings.sinks)),
            drawn.where,
            gathering.projection,
            rho=settings.rho,
            post_norm=settings.final_state == "post_norm",
            sink_multiple=settings.sink_multiple,
            dtype=gathering.states.dtype,
        )
        if in_flight:
            collect(*in_flight)
        in_flight = left
    collect(*in_flight)
    return results, sums if target.mesh is None else total(sums)


def _rows_of(batch: Batch, weights: UInt8[np.ndarray, "C S"]) -> Float32[np.ndarray, "C b"]:
    """The weights of a batch's samples; 0 for rows that are all padding."""
    rows = np.zeros((len(weights), len(batch.tokens)), np.float32)
    rows[:, : len(batch.samples)] = weights[:, list(batch.samples)]
    return rows


def origin_of(target: Target) -> dict[str, str]:
    """What a calibration records of its target."""
    return {
        "target_name": target.name,
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.decoder.dtype),
    }


def assemble(
    origin: dict[str, str],
    settings: CalibrationSettings,
    samples: Samples,
    plan: list[Batch],
    results: list[BatchResult],
    sums: Sums,
    tallies: dict[str, int],
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
        tallies=tallies,
        replicates=replicates,
        **origin,
    )


def require_blocks(calibration: Calibration) -> None:
    settings = calibration.settings
    pool = POOLS.index(("filtered", settings.sinks))
    if calibration.counts[pool] == 0:
        raise LayerwaveError(
            f"no sample kept a block of {settings.block} tokens: of {calibration.lengths.max()} tokens of the "
            f"longest of {len(calibration.lengths)}, rho={settings.rho:g} and sinks={settings.sinks!r} kept "
            f"at most {calibration.kept[pool].max()}: give longer conversations, a smaller block or a larger rho"
        )


def known(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuses keyword arguments that are not settings."""
    fields = asdict(CalibrationSettings())
    for name in changes:
        if name not in fields:
            raise LayerwaveError(f"unknown setting {name!r}, expected one of {', '.join(fields)}: rename it")
    return changes
