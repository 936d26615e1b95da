"""States that a user brings, token by token: the pass over conversations without its target.

What another program stored is reduced exactly as the target's own pass would (stream.py), one sample at a time. Two
things cannot be seen in an array, and are part of every sample: on which side of the final norm its last state was
taken, and how its source counted layers. Whoever reads the files says them (interop/state_files.py); nobody guesses.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import numpy as np
from jaxtyping import Float, Float32, Integer

from layerwave.calibration.artifact import Calibration, check_layers
from layerwave.calibration.replicates import sample_weights
from layerwave.calibration.self_checks import check_scores, judged
from layerwave.calibration.settings import POOLS, CalibrationSettings
from layerwave.calibration.step import BatchResult, Sums, states_step
from layerwave.calibration.stream import Progress, assemble, known, require_blocks, warn_of_near_cuts
from layerwave.calibration.tokens import Batch, Samples, bucket, fingerprint
from layerwave.errors import LayerwaveError
from layerwave.warned import warnings_kept

FinalState = Literal["pre_norm", "post_norm"]
Numbering = Literal["output", "boundary"]


@dataclass(frozen=True, eq=False)
class GivenStates:
    """The states of one token sequence after every layer.

    Raises:
        LayerwaveError: arrays that do not fit together, or that are not finite; the message begins with `where`.
    """

    states: Float[np.ndarray, "N T D"]
    """Outputs of layers 0 ... N-1, without the embedding."""
    final_state: FinalState
    """Whether the last layer's was taken before or after the final norm."""
    numbering: Numbering
    """How the source counted: outputs of layers from 0, or boundaries, of which 0 is the embedding. Recorded only."""
    where: str
    """File or place, for messages."""
    entropies: Float[np.ndarray, " T"] | None = None
    """Entropy in nats of the target's next-token distribution at each token; without them nothing can be filtered."""
    tokens: Integer[np.ndarray, " T"] | None = None
    """Token ids. With them the sample has the fingerprint that the target's pass would give it."""
    masked: int = 0
    """Tokens that the source held and a mask left out."""

    def __post_init__(self):
        length = self.states.shape[1]
        for name in ("entropies", "tokens"):
            array = getattr(self, name)
            if array is not None and array.shape != (length,):
                raise LayerwaveError(f"{self.where}: states of {length} tokens, but {name} of shape {array.shape}")
        for name in ("states", "entropies"):
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                raise LayerwaveError(f"{self.where}: {name} hold NaN or infinity, but must be finite: store them again")


def calibrate_states(
    given: Sequence,
    settings: CalibrationSettings | None = None,
    *,
    name: str = "given states",
    progress: Progress | None = None,
    **changes: Any,
) -> Calibration:
    """The calibration of stored states: of the states of a target's pass, that pass's own, to rounding.

    Args:
        given: `GivenStates`, asked for one at a time, so that the sequence may read files (`interop.StateFiles`).
        settings: as for `calibrate`. `final_state` becomes that of the samples; there is no token sample, which would
            need the target's head and embedding.
        name: recorded as the target's; only calibrations of one name can be merged.
        progress: called after each sample.

    The tallies count what was left out, and the samples by how their sources number layers.

    Raises:
        LayerwaveError: no samples, or none of a block; samples that differ in layers, features, dtype or final state;
            `final_state` post_norm for states from before the norm; `rho` below 1 for samples without entropies.
    """
    settings = replace(settings or CalibrationSettings(), **known(changes))
    if not len(given):
        raise LayerwaveError("no samples of states: give at least one")
    order = np.random.default_rng(settings.seed).permutation(len(given))[: settings.samples]
    first = given[int(order[0])]
    settings = _settled(settings, first)
    tallies = Counter({f"samples numbered by {numbering}": 0 for numbering in get_args(Numbering)})
    tallies["samples not drawn"] = len(given) - len(order)
    seen: Counter = Counter()
    plan: list[Batch] = []
    results: list[BatchResult] = []
    fingerprints: list[np.uint64] = []
    sums, longest = None, 0
    for number, index in enumerate(order, 1):
        sample = given[int(index)]
        _require_alike(sample, first, settings)
        length = sample.states.shape[1]
        longest = max(longest, length)
        tallies.update(
            {
                f"samples numbered by {sample.numbering}": 1,
                "masked tokens": sample.masked,
                "samples shorter than a block": int(length < settings.block),
                "samples cut to max_length": int(length > settings.max_length),
            }
        )
        if length >= settings.block:
            batch, states, entropy = _padded(sample, len(plan), settings)
            fingerprints.append(_fingerprint(sample, int(batch.lengths[0]), seen))
            weights = sample_weights(np.array(fingerprints[-1:]), settings.replicates, settings.seed)
            sums, result, _ = states_step(
                sums or Sums.zeros(len(states), len(weights), settings.block, states.shape[-1]),
                states,
                entropy,
                batch.lengths,
                weights.astype(np.float32),
                POOLS.index(("filtered", settings.sinks)),
                rho=settings.rho,
                sink_multiple=settings.sink_multiple,
            )
            plan.append(batch)
            if results:  # one sample late: files do not pile up before the device
                results[-1] = jax.device_get(results[-1])
            results.append(result)
        if progress is not None:
            progress(number, len(order), sum(int(batch.lengths[0]) for batch in plan))
    if not plan:
        raise LayerwaveError(
            f"every sample is shorter than a block of {settings.block} tokens ({len(order)} samples, the longest of "
            f"{longest} tokens): give longer samples or a smaller block"
        )
    results = jax.device_get(results)
    check_layers(np.max([result.largest for result in results], axis=0))
    origin = {
        "target_name": name,
        "target_fingerprint": hashlib.sha256(f"given states of {name}".encode()).hexdigest(),
        "target_dtype": str(first.states.dtype),
    }
    ids = tuple(batch.tokens[0, : batch.lengths[0]] for batch in plan)
    tallies["compilations"] = len({batch.tokens.shape for batch in plan})
    read = Samples(ids, np.array(fingerprints), dict(tallies))
    calibration = assemble(origin, settings, read, plan, results, sums, read.tallies)
    require_blocks(calibration)
    with warnings_kept() as warnings:
        warn_of_near_cuts(results, plan, read)
        checks = judged(check_scores(calibration.states, settings.seed), half=False)
    return replace(calibration, checks=checks, warnings=tuple(warnings))


def _settled(settings: CalibrationSettings, first: GivenStates) -> CalibrationSettings:
    """The settings as they hold for given states."""
    if settings.final_state == "post_norm" and first.final_state == "pre_norm":
        raise LayerwaveError(
            f"{first.where}: the last layer's states are from before the final norm, but final_state is post_norm: "
            "leave final_state out, or store the states after the norm"
        )
    return replace(settings, final_state=first.final_state, token_sample=False)


def _require_alike(sample: GivenStates, first: GivenStates, settings: CalibrationSettings) -> None:
    """Refuses a sample that cannot be added to the first one, or not be filtered."""
    for what, of in {
        "layers": lambda given: given.states.shape[0],
        "features": lambda given: given.states.shape[2],
        "dtype": lambda given: str(given.states.dtype),
        "final state": lambda given: given.final_state,
    }.items():
        if of(sample) != of(first):
            raise LayerwaveError(
                f"{sample.where} and {first.where} differ in {what} ({of(sample)} and {of(first)}), but all samples "
                "must be states of one target, stored in one way: calibrate them apart"
            )
    if sample.entropies is None and settings.rho < 1:
        raise LayerwaveError(
            f"{sample.where} holds no entropies, so its uncertain tokens (rho={settings.rho:g}) cannot be told: store "
            "the next-token entropies with the states, or take all tokens with rho=1 (--rho 1)"
        )


def _padded(
    sample: GivenStates, index: int, settings: CalibrationSettings
) -> tuple[Batch, Float[np.ndarray, "N 1 T D"], Float32[np.ndarray, "1 T"]]:
    """A sample as a batch of its own in its length bucket, cut to `max_length`; entropy 0 where there is none."""
    N, T, D = sample.states.shape
    T = min(T, settings.max_length)
    width = bucket(T, settings.max_length)
    states, entropy = np.zeros((N, 1, width, D), sample.states.dtype), np.zeros((1, width), np.float32)
    states[:, 0, :T] = sample.states[:, :T]
    if sample.entropies is not None:
        entropy[0, :T] = sample.entropies[:T]
    return Batch((index,), np.zeros((1, width), np.int32), np.array([T], np.int32)), states, entropy


def _fingerprint(sample: GivenStates, length: int, seen: Counter) -> np.uint64:
    """That of the first `length` token ids; without ids the digest of the states stands in their place."""
    if sample.tokens is None:
        content = np.ascontiguousarray(sample.states[:, :length]).view(np.uint8)
        ids = np.frombuffer(hashlib.sha256(content).digest(), "<i4").astype(np.int32)
    else:
        ids = sample.tokens[:length].astype(np.int32)
    first = fingerprint(ids)
    seen[first] += 1
    return fingerprint(ids, seen[first] - 1)
