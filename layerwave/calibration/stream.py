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
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32, Int32, UInt8

from layerwave.calibration.artifact import POOLS, Calibration, check_layers
from layerwave.calibration.conversations import Conversations, read_conversations
from layerwave.calibration.plan import SHARE_TOKENS
from layerwave.calibration.replicates import Replicates, sample_weights
from layerwave.calibration.self_checks import Probe, check_alone, check_rotations, check_scores, check_tokens, judged
from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.sharded_step import empty_sums, sharded_step, total
from layerwave.calibration.step import BatchResult, DrawnStates, Sums, batch_step
from layerwave.calibration.token_gather import Gathering, warn_of_sides
from layerwave.calibration.tokens import Batch, Samples, batches, draw_samples
from layerwave.errors import LayerwaveError
from layerwave.targets import Target
from layerwave.targets.mesh import shares
from layerwave.warned import warn, warnings_kept

logger = logging.getLogger(__name__)

NEAR_CUT = 2e-6
"""Entropies nearer than this may change places with the shape of a batch: float32 rounding of them, in nats."""

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
    warnings: tuple[str, ...] = ()
    """Of the preparation."""

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
        with warnings_kept() as warnings:
            conversations = read_conversations(conversations)
            samples = draw_samples(target.tokenizer, target.config.vocab_size, conversations, settings)
            check_tokens(target, samples, templated=all(conversation.turns for conversation in conversations))
        batch_tokens = shares(target.mesh) * SHARE_TOKENS if batch_tokens is None else batch_tokens
        plan = list(batches(samples.ids, settings.max_length, batch_tokens, shares(target.mesh)))
        weights = sample_weights(samples.fingerprints, settings.replicates, settings.seed)
        gathering = Gathering.of(target, samples, plan, settings)
        work = cls(target, settings, samples, plan, weights, gathering, tuple(warnings))
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
        probed = self.probed - (part.start or 0)
        with warnings_kept() as warnings:
            probed = probed if 0 <= probed < len(plan) else None
            results, sums, checks = _run(self.target, settings, plan, self.weights, gathering, probed, progress)
            warn_of_near_cuts(results, plan, self.samples)
        calibration = assemble(origin_of(self.target), settings, self.samples, plan, results, sums, self.tallies)
        tokens = gathering.finish(self.target, self.samples) if settings.token_sample else None
        return replace(calibration, tokens=tokens, checks=checks, warnings=tuple(warnings))

    @property
    def probed(self) -> int:
        """The batch of fewest tokens, on which the pass checks itself, whichever part it stands in."""
        return min(range(len(self.plan)), key=lambda index: self.plan[index].tokens.size)

    def checked(self, calibration: Calibration) -> Calibration:
        """The calibration of all batches, if it is one to be used; says what its token sample lacks."""
        require_blocks(calibration)
        with warnings_kept() as warnings:
            if calibration.tokens is not None:
                warn_of_sides(calibration.tokens)
            checks = check_scores(calibration.states, self.settings.seed)
            checks |= check_rotations(self.target, int(calibration.lengths.max()))
            checks = judged(calibration.checks | checks, half=is_half(self.target, self.gathering.states))
        warnings = dict.fromkeys((*self.warnings, *calibration.warnings, *warnings))
        return replace(calibration, checks=checks, warnings=tuple(warnings))


def _run(
    target: Target,
    settings: CalibrationSettings,
    plan: list[Batch],
    weights: UInt8[np.ndarray, "C S"],
    gathering: Gathering,
    probed: int | None,
    progress: Progress | None,
) -> tuple[list[BatchResult], Sums, dict[str, float]]:
    """Sends every batch through the device; collects one batch late: the device never waits.

    `probed` is the batch of the self-checks, whose deviations come last.
    """
    graphdef, params = nnx.split(target.decoder)
    config, pool = target.config, POOLS.index(("filtered", settings.sinks))
    step = batch_step if target.mesh is None else partial(sharded_step, target.mesh)

    def advance(sums: Any, batch: Batch, where: Int32[np.ndarray, "2 K"]) -> tuple[Any, BatchResult, DrawnStates]:
        return step(
            graphdef,
            params,
            sums,
            batch.tokens,
            batch.lengths,
            _rows_of(batch, weights),
            pool,
            where,
            gathering.projection,
            rho=settings.rho,
            post_norm=settings.final_state == "post_norm",
            sink_multiple=settings.sink_multiple,
            dtype=gathering.states.dtype,
        )

    def empty() -> Any:
        return empty_sums(target.mesh, config.num_layers, len(weights), settings.block, config.hidden_size)

    checks: dict[str, float] = {}
    if probed is not None:  # before the sums of the pass take their room
        probe = Probe.of(plan[probed], gathering.batches[probed])
        own, *alone = advance(empty(), probe.alone, probe.where)
        own = np.asarray((own if target.mesh is None else total(own)).pools[:, pool])
        alone = tuple(jax.device_get(alone))
    sums = empty()
    results: list[BatchResult] = []

    def collect(result: BatchResult, drawn: DrawnStates) -> None:
        drawn = jax.device_get(drawn)
        gathering.put(len(results), drawn)
        results.append(jax.device_get(result))
        check_layers(results[-1].largest)
        if not results[-1].finite:
            raise LayerwaveError(
                "the target's next-token entropies hold NaN or infinity, but must be finite: check final norm and "
                "head of the checkpoint, or load the target with dtype float32"
            )
        if len(results) - 1 == probed:
            found = probe.compared(pool, alone, (results[-1], drawn))
            found |= check_alone(target.decoder, probe, *alone, own, settings, pool)
            checks.update(judged(found, half=is_half(target, gathering.states)))
        if progress is not None:
            finished = plan[: len(results)]
            progress(
                sum(len(batch.samples) for batch in finished),
                sum(len(batch.samples) for batch in plan),
                sum(int(batch.lengths.sum()) for batch in finished),
            )

    in_flight: list[Any] = []
    for batch, drawn in zip(plan, gathering.batches, strict=True):
        sums, *left = advance(sums, batch, drawn.where)
        if in_flight:
            collect(*in_flight)
        in_flight = left
    collect(*in_flight)
    return results, sums if target.mesh is None else total(sums), checks


def is_half(target: Target, kept: np.ndarray) -> bool:
    """Whether something is computed in bfloat16, or kept in it."""
    return jnp.bfloat16 in (target.decoder.dtype, kept.dtype)


def warn_of_near_cuts(results: Sequence[BatchResult], plan: Sequence[Batch], samples: Samples) -> None:
    """Says where rounding decides which of two tokens the filter keeps: with other batches it may be the other."""
    gaps: dict[int, float] = {}
    for result, batch in zip(results, plan, strict=True):
        gaps |= zip(batch.samples, result.gap.tolist(), strict=False)
    if near := [index for index, gap in gaps.items() if gap < NEAR_CUT]:
        closest = min(near, key=gaps.get)
        warn(
            f"near ties: in {len(near)} of {len(gaps)} samples the filter cuts between two tokens whose entropies "
            f"differ by less than {NEAR_CUT:g} nats (least {gaps[closest]:.1e}, sample "
            f"{samples.fingerprints[closest]:016x}): other batches, devices or machines may keep the other one"
        )


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
