"""What every pass checks of itself, for less than a fiftieth of its time.

Wrong numbers look like right ones, so what has to agree is compared: one sample alone with the same sample among
others and other padding; what the device made of it with float64 on the host; tokens and rotations with what they must
be. What is far off is an error; what is farther off than rounding a warning; the deviations are in the artifact.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int32

from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.step import BatchResult, DrawnStates
from layerwave.calibration.token_draw import BatchDraw
from layerwave.calibration.tokens import Batch, Samples, adds_bos, leading_bos
from layerwave.errors import LayerwaveError
from layerwave.targets import Target
from layerwave.targets.decoder import Decoder
from layerwave.targets.rope import rotate, rotation
from layerwave.warned import warn

POSITIONS, HEAD_ROWS, SETS = 8, 1024, 32
"""How much is checked: positions with the head, of which so many rows are; layer sets."""


class Limits(NamedTuple):
    """Deviations beyond which there is a warning, and an error."""

    warning: float
    error: float


# In float32, and in bfloat16 where something is computed or kept in it.
LIMITS = {
    "states alone and in the batch, relative": (Limits(1e-3, 0.1), Limits(0.1, 0.5)),
    "curve alone and in the batch, nats": (Limits(1e-3, 0.5), Limits(0.2, 1.0)),
    "curve in float32 and float64, nats": (Limits(1e-3, 0.1), Limits(1e-3, 0.1)),
    "norm of the last state and what the head reads, relative": (Limits(1e-4, 1e-2), Limits(2e-2, 0.2)),
    "logits in float32 and float64, relative": (Limits(1e-4, 1e-2), Limits(1e-4, 1e-2)),
    "token entropy and that of the logits, nats": (Limits(1e-3, 0.1), Limits(1e-3, 0.1)),
    "rotary positions, relative": (Limits(1e-2, 0.1), Limits(1e-2, 0.1)),
    "scores of sets in float32 and float64, nats": (Limits(1e-3, np.inf), Limits(1e-3, np.inf)),
}


def judged(checks: dict[str, float], *, half: bool) -> dict[str, float]:
    """The deviations, when all have been compared with their limits; `half`: those of bfloat16.

    Raises `LayerwaveError` for one beyond its second limit, or NaN.
    """
    for name, deviation in checks.items():
        limits = LIMITS[name][half]
        text = f"self-check: {name}: differ by {deviation:.1e}"
        if not deviation <= limits.error:
            raise LayerwaveError(
                f"{text}, but at most by {limits.error:g}: something else is computed than should be; "
                "check the checkpoint and the accelerator's driver, and report it with `layerwave doctor`"
            )
        if deviation > limits.warning:
            warn(f"{text}, more than rounding should ({limits.warning:g}): numbers are less exact than they look")
    return checks


@dataclass(frozen=True, eq=False)
class Probe:
    """One sample of a batch, alone in a batch of the same shape: in the last row, with other padding."""

    batch: Batch
    row: int
    """Of the sample in `batch`."""
    where: Int32[np.ndarray, "2 K"]
    """Its drawn positions, and then those that follow them, as far as there is room."""
    places: Int32[np.ndarray, "2 _"]
    """Of its drawn positions: their places among those of `batch`, and here."""

    @classmethod
    def of(cls, batch: Batch, drawn: BatchDraw) -> "Probe":
        row = int(np.argmin(batch.lengths[: len(batch.samples)]))
        inside = np.flatnonzero(drawn.where[0, : len(drawn.places)] == row)
        positions = drawn.where[1, inside]
        following = np.minimum(positions + 1, batch.lengths[row] - 2)
        room = drawn.where.shape[1]
        where = np.zeros((2, room), np.int32)
        where[0] = len(batch.tokens) - 1
        where[1] = np.resize(np.concatenate([positions, following]), room) if len(inside) else 0
        return cls(batch, row, where, np.stack([inside, np.arange(len(inside))]).astype(np.int32))

    @property
    def alone(self) -> Batch:
        tokens, lengths = np.zeros_like(self.batch.tokens), np.zeros_like(self.batch.lengths)
        length = int(self.batch.lengths[self.row])
        tokens[:] = self.batch.tokens[self.row].max()  # padding that would be seen: `batch` has zeros
        tokens[-1, :length], lengths[-1] = self.batch.tokens[self.row, :length], length
        return Batch(self.batch.samples[self.row : self.row + 1], tokens, lengths)

    def compared(self, pool: int, alone: tuple[BatchResult, DrawnStates], among: tuple[BatchResult, DrawnStates]):
        """Deviations of what the pass made of the sample from what it makes of it alone."""
        (result, drawn), (results, drawns) = alone, among
        curves = result.curves[pool, -1], results.curves[pool, self.row]
        there, here = self.places
        ours, theirs = (np.asarray(d.states[:, p], np.float64) for d, p in ((drawn, here), (drawns, there)))
        scale = np.linalg.norm(theirs, axis=-1)
        apart = np.linalg.norm(ours - theirs, axis=-1) / np.where(scale == 0, 1, scale)
        checks = {"states alone and in the batch, relative": _largest(apart)} if len(here) else {}
        if np.isfinite(curves).all():  # without a block there is none
            checks["curve alone and in the batch, nats"] = _largest(curves[0] - curves[1])
        return checks


def check_alone(
    decoder: Decoder,
    probe: Probe,
    result: BatchResult,
    drawn: DrawnStates,
    sums: Float32[np.ndarray, "N B D"],
    settings: CalibrationSettings,
    pool: int,
) -> dict[str, float]:
    """Deviations of the device's numbers for the sample alone from those of float64; `sums` are of its blocks."""
    checks = {}
    curve = np.asarray(result.curves[pool, -1], np.float64)
    if np.isfinite(curve).all():
        grams = sums.astype(np.float64) @ sums.astype(np.float64).swapaxes(1, 2)
        checks["curve in float32 and float64, nats"] = _largest(curve - [_entropy(gram) for gram in grams])
    normed, states = (np.asarray(array, np.float64) for array in (drawn.normed, drawn.states[-1]))
    # The state at a position, and what the head read there: `normed` of a drawn position is of the one after it.
    here, before = np.nonzero(probe.where[1][:, None] == probe.where[1][None, :] + 1)
    if len(here) and settings.final_state == "pre_norm" and states.shape[-1] == normed.shape[-1]:
        norm = decoder.norm
        scale = np.asarray(norm.scale[...], np.float64) + norm.offset
        wanted = states[here] / np.sqrt(np.mean(states[here] ** 2, axis=-1, keepdims=True) + norm.eps) * scale
        checks["norm of the last state and what the head reads, relative"] = _largest(
            np.linalg.norm(wanted - normed[before], axis=-1) / np.linalg.norm(wanted, axis=-1)
        )
    return checks | (check_head(decoder, drawn.normed[:POSITIONS], drawn.entropy[:POSITIONS]) if len(normed) else {})


def check_head(
    decoder: Decoder, normed: Float[np.ndarray, "K D"], entropies: Float32[np.ndarray, " K"]
) -> dict[str, float]:
    """Whether logits are as exact as float32, which accelerators may round more coarsely, and the entropies theirs."""
    logits = np.asarray(decoder.logits(jnp.asarray(normed, decoder.dtype)), np.float64)
    head = np.asarray(decoder.head_weight())
    rows = np.linspace(0, len(head) - 1, min(HEAD_ROWS, len(head))).astype(np.int32)
    exact = normed.astype(np.float64) @ head[rows].astype(np.float64).T
    shifted = logits - logits.max(axis=1, keepdims=True)
    mass = np.exp(shifted).sum(axis=1)
    entropy = np.log(mass) - (np.exp(shifted) * shifted).sum(axis=1) / mass
    return {
        "logits in float32 and float64, relative": _largest(logits[:, rows] - exact) / _largest(exact),
        "token entropy and that of the logits, nats": _largest(entropy - entropies),
    }


def check_rotations(target: Target, length: int) -> dict[str, float]:
    """Whether scores of rotated queries and keys depend on their distance alone, as at the start so at `length`."""
    config = target.config
    places = np.array([0, 1, 2, 3, length - 4, length - 3, length - 2, length - 1], np.int32)
    vectors = np.random.default_rng(0).normal(size=(2, config.head_dim)).astype(np.float32)
    ropes = [config.rope, *([config.local_rope] if config.local_rope else [])]
    return {"rotary positions, relative": max(_largest(_drift(rope, places, vectors)) for rope in ropes)}


def _drift(rope: Any, places: Int32[np.ndarray, " n"], vectors: Float32[np.ndarray, "2 d"]) -> np.ndarray:
    @jax.jit
    def scores(vectors):
        turn = rotation(jnp.asarray(places)[None], rope, vectors.shape[1], jnp.full(1, places[-1] + 1, jnp.int32))
        shape = (1, len(places), 1, vectors.shape[1])
        query, key = (rotate(jnp.broadcast_to(vector, shape), *turn)[0, :, 0] for vector in vectors)
        return jnp.dot(query, key.T, precision=jax.lax.Precision.HIGHEST)

    found = np.asarray(scores(vectors), np.float64)
    half = len(places) // 2
    return (found[:half, :half] - found[half:, half:]) / (np.linalg.norm(vectors, axis=1).prod())


def check_tokens(target: Target, samples: Samples, *, templated: bool) -> None:
    """One BOS, no more, at the start of every sample, if the tokenizer adds it, or the template of all writes it.

    Raises `LayerwaveError` for two; warns of a template that writes a BOS which the tokenizer does not know for one.
    """
    tokenizer = target.tokenizer
    found = np.array([leading_bos(tokenizer, ids[:3].tolist())[0] for ids in samples.ids])
    if (found > 1).any():
        raise LayerwaveError(
            f"{(found > 1).sum()} of {len(found)} samples begin with two BOS: take one out of the chat template"
        )
    written = adds_bos(tokenizer) or (templated and "bos_token" in str(tokenizer.chat_template))
    if tokenizer.bos_token_id is not None and written and (missing := int((found == 0).sum())):
        warn(
            f"{missing} of {len(found)} samples do not begin with the BOS {tokenizer.bos_token!r}, though template or "
            "tokenizer know one: the target may see other tokens than it was trained on"
        )


def check_scores(states: Float32[np.ndarray, "N B D"], seed: int) -> dict[str, float]:
    """How far the entropy of sets of one to three layers moves when Grams are taken in float32 in place of float64."""
    random = np.random.default_rng(seed)
    sets = [random.permutation(len(states))[: 1 + i % 3] for i in range(SETS)]
    grams = [layers @ layers.swapaxes(1, 2) for layers in (states, states.astype(np.float64))]
    apart = [_entropy(grams[0][layers].sum(axis=0)) - _entropy(grams[1][layers].sum(axis=0)) for layers in sets]
    return {"scores of sets in float32 and float64, nats": _largest(np.array(apart))}


def _entropy(gram: np.ndarray) -> float:
    values = np.maximum(np.linalg.eigvalsh(gram).astype(np.float64), 0)
    shares = values[values > 0] / values.sum()
    return float(-(shares * np.log(shares)).sum())


def _largest(deviations: Any) -> float:
    return float(np.abs(deviations).max())
