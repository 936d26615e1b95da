"""The token sample's part of the pass: how its states are stored, their way off the device, and their targets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.step import DrawnStates
from layerwave.calibration.token_draw import BatchDraw, TokenDraw, cut_into_batches, draw_positions
from layerwave.calibration.token_sample import TOP_TOKENS, TokenSample
from layerwave.calibration.tokens import Batch, Samples
from layerwave.errors import LayerwaveError
from layerwave.kernels.precision import AnyArray
from layerwave.targets import Target
from layerwave.warned import warn

NARROWEST = 64
"""Width to which states may be projected at the least: entries of Grams then err by 1/8 of the norms (our decision)."""


class TokenFormat(NamedTuple):
    """How the token sample is stored: one dtype for all its states, and W, less than D if they are projected."""

    dtype: np.dtype
    width: int


def token_format(num_layers: int, features: int, settings: CalibrationSettings) -> TokenFormat:
    """The best format that fits into `token_megabytes`: float32, then bfloat16, then that and projected states.

    It follows from model and settings alone, so that all parts of a calibration agree, and counts the head's rows at
    their most, `TOP_TOKENS` new ones for every scoring position. Without a token sample nothing has to fit.

    Raises:
        LayerwaveError: not even a width of 64 would fit.
    """
    if not settings.token_sample:
        return TokenFormat(np.dtype(np.float32), features)
    positions = settings.fit_positions + settings.score_positions
    others = features * (2 * positions + TOP_TOKENS * settings.score_positions)
    bytes_allowed = settings.token_megabytes * 1e6
    for dtype in (np.dtype(np.float32), np.dtype(jnp.bfloat16)):
        if dtype.itemsize * (num_layers * positions * features + others) <= bytes_allowed:
            return TokenFormat(dtype, features)
    width = int((bytes_allowed / dtype.itemsize - others) // (num_layers * positions))
    narrowest = min(NARROWEST, features)
    if width < narrowest:
        least = dtype.itemsize * (num_layers * positions * narrowest + others) / 1e6
        raise LayerwaveError(
            f"token_megabytes is {settings.token_megabytes:g}, but {positions} positions of {num_layers} layers and "
            f"{features} features take {math.ceil(least)} at the least: raise token_megabytes, lower fit_positions and "
            "score_positions, or leave the sample out with token_sample=False (--no-token-sample)"
        )
    return TokenFormat(dtype, width)


def token_sample_bytes(num_layers: int, features: int, settings: CalibrationSettings) -> int:
    """Size of a token sample with all positions, counted as `token_format` does; 0 without one."""
    if not settings.token_sample:
        return 0
    dtype, width = token_format(num_layers, features, settings)
    positions = settings.fit_positions + settings.score_positions
    others = features * (2 * positions + TOP_TOKENS * settings.score_positions)
    return dtype.itemsize * (num_layers * positions * width + others)


def projection_matrix(features: int, width: int, seed: int) -> Float32[Array, "{features} {width}"]:
    """Entries of N(0, 1/W): a Gram of projected rows is on average that of the rows themselves."""
    word = int(np.random.PCG64(seed).random_raw()) >> 32  # keys take 32 bits, and drop others without a word
    return jax.random.normal(jax.random.key(word), (features, width)) / jnp.sqrt(jnp.float32(width))


@dataclass(frozen=True, eq=False)
class Gathering:
    """What the pass is asked for at the drawn positions, and room on the host that it fills batch by batch."""

    draw: TokenDraw
    batches: list[BatchDraw]
    projection: Float32[Array, "D W"] | None
    states: Float[np.ndarray, "N Q W"]
    normed: Float[np.ndarray, "Q D"]
    sinks: Bool[np.ndarray, " Q"]

    @classmethod
    def of(cls, target: Target, samples: Samples, plan: Sequence[Batch], settings: CalibrationSettings) -> "Gathering":
        """Draws the positions, none without a token sample. Raises `LayerwaveError` as `token_format` does."""
        N, D = target.config.num_layers, target.config.hidden_size
        dtype, width = token_format(N, D, settings)
        draw = draw_positions(samples.fingerprints, [len(sample) for sample in samples.ids], settings)
        Q = len(draw.positions)
        return cls(
            draw=draw,
            batches=cut_into_batches(draw, plan),
            projection=projection_matrix(D, width, settings.seed) if width < D else None,
            states=np.empty((N, Q, width), dtype),
            normed=np.empty((Q, D), dtype),
            sinks=np.empty(Q, bool),
        )

    def part(self, batches: slice) -> "Gathering":
        """The same for some of the batches alone, with room of its own."""
        chosen = self.batches[batches]
        kept = np.sort(np.concatenate([batch.places for batch in chosen]))
        draw = self.draw
        first = len(draw.positions) - draw.scoring
        return replace(
            self,
            draw=TokenDraw(draw.owners[kept], draw.positions[kept], draw.priorities[kept], int((kept >= first).sum())),
            batches=[BatchDraw(batch.where, np.searchsorted(kept, batch.places)) for batch in chosen],
            states=np.empty_like(self.states, shape=(len(self.states), len(kept), self.states.shape[2])),
            normed=np.empty_like(self.normed, shape=(len(kept), self.normed.shape[1])),
            sinks=np.empty_like(self.sinks, shape=len(kept)),
        )

    def put(self, batch: int, drawn: DrawnStates) -> None:
        """Takes what left the device with a batch; what follows its own positions is padding."""
        places = self.batches[batch].places
        self.states[:, places] = drawn.states[:, : len(places)]
        self.normed[places] = drawn.normed[: len(places)]
        self.sinks[places] = drawn.sinks[: len(places)]

    def finish(self, target: Target, samples: Samples) -> TokenSample:
        """Adds embeddings, most probable tokens and their rows of the head."""
        decoder, dtype, draw = target.decoder, self.states.dtype, self.draw
        head = decoder.head_weight()
        fit = len(draw.positions) - draw.scoring
        top_tokens, log_normaliser = most_probable(self.normed[fit:], head, k=min(TOP_TOKENS, len(head)))
        vocabulary = np.unique(top_tokens)
        following = [samples.ids[owner][t + 1] for owner, t in zip(draw.owners, draw.positions, strict=True)]
        return TokenSample(
            states=self.states,
            embeddings=_rows(decoder.embed_tokens.embedding[...], np.array(following, np.int32), dtype),
            normed=self.normed,
            head=_rows(head, vocabulary, dtype),
            vocabulary=vocabulary,
            top_tokens=np.asarray(top_tokens),
            log_normaliser=np.asarray(log_normaliser),
            samples=samples.fingerprints[draw.owners],
            positions=draw.positions,
            priorities=draw.priorities,
            sinks=self.sinks,
        )


def warn_of_sides(sample: TokenSample) -> None:
    """Says so when one side of a token sample has not two conversations."""
    sides = [len(np.unique(sample.samples[side])) for side in (sample.fitting, sample.scoring)]
    if min(sides) < 2:
        warn(
            f"the token sample has {sides[0]} conversations to fit predicted acceptance and {sides[1]} to score it, "
            "but two are needed for each: give more conversations, ask for more positions on the smaller side "
            "(fit_positions, score_positions), or take another seed"
        )


def _rows(table: Float[Array, "V D"], tokens: Int32[np.ndarray, " R"], dtype: np.dtype) -> Float[np.ndarray, "R D"]:
    return np.asarray(table[tokens].astype(dtype))


@partial(jax.jit, static_argnames=("k", "chunk"))
def most_probable(
    normed: Float[AnyArray, "Q D"], head: Float[AnyArray, "V D"], *, k: int, chunk: int = 128
) -> tuple[Int32[Array, "Q k"], Float32[Array, " Q"]]:
    """The k most probable next tokens of final-normed states, and `log Σ_v exp(w_v · y)`, by chunks of positions.

    Products are exact and sums float32. The head is rounded to the dtype of `normed`, as the sample keeps it, so that
    `exp(w_v · y - log_normaliser)` of what is kept are the probabilities of one distribution.
    """
    head = head.astype(normed.dtype)

    def of(state: Float[Array, " D"]) -> tuple[Int32[Array, " k"], Float32[Array, ""]]:
        logits = jnp.dot(head, state, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return jax.lax.top_k(logits, k)[1], jax.nn.logsumexp(logits)

    return jax.lax.map(of, normed, batch_size=chunk)
