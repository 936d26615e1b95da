"""Plain batched generation: prefill, then one token a step, in one jitted call."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, Key

from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, KVCache

_BUCKET = 64
"""Prompts are padded to a multiple of this many tokens, which bounds the number of compilations."""


@dataclass(frozen=True)
class GenerationSettings:
    """How to continue prompts. Raises `LayerwaveError` for values out of range."""

    max_new_tokens: int = 256
    """Tokens to make at most, the end token included."""
    temperature: float = 0.0
    """0 is greedy; greater values sample from the distribution sharpened or flattened by it."""
    end_token: int | None = None
    """Token after which a sequence stops; None: it runs to max_new_tokens."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise LayerwaveError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise LayerwaveError(f"temperature is {self.temperature}, expected a finite number of at least 0")


class _Progress(NamedTuple):
    """State of the decoding loop; `made` holds the end token, or 0, where a sequence has stopped."""

    cache: KVCache
    made: Int[Array, "b steps"]
    done: Bool[Array, " b"]
    step: Int[Array, ""]
    key: Key[Array, ""]


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int] | Int[np.ndarray, " _"]] | Int[np.ndarray, "b T"],
    settings: GenerationSettings,
    key: Key[Array, ""],
) -> list[list[int]]:
    """Continues each prompt; a prompt's continuation does not depend on the others in the batch when greedy.

    Returns:
      The new token ids of each prompt, the end token included where it was reached.

    Raises:
      LayerwaveError: no prompt, an empty one, one with a token outside the target's vocabulary, or one that leaves no
        room for `max_new_tokens` in the target's context.
    """
    if len(prompts) == 0 or not all(map(len, prompts)):
        raise LayerwaveError(f"got {len(prompts)} prompts of lengths {[len(p) for p in prompts]}; each needs a token")
    size = decoder.config.vocab_size
    outside = next((token for prompt in prompts for token in prompt if not 0 <= token < size), None)
    if outside is not None:
        raise LayerwaveError(
            f"a prompt has the token {outside}, expected 0 to {size - 1}; encode it with the target's own tokenizer"
        )
    longest, room = max(map(len, prompts)), decoder.config.max_positions - settings.max_new_tokens
    if longest > room:
        raise LayerwaveError(
            f"a prompt has {longest} tokens, and {settings.max_new_tokens} new ones leave room for {room}; "
            "shorten the prompt or lower max_new_tokens"
        )
    padded = np.zeros((len(prompts), -(-longest // _BUCKET) * _BUCKET), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    graphdef, params = nnx.split(decoder)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    made = np.asarray(_generate(graphdef, settings, params, padded, lengths, key))
    return [_until(row, settings.end_token) for row in made.tolist()]


def _until(tokens: list[int], end_token: int | None) -> list[int]:
    return tokens[: tokens.index(end_token) + 1] if end_token in tokens else tokens


@partial(jax.jit, static_argnums=(0, 1))
def _generate(graphdef, settings: GenerationSettings, params, prompts_bt, lengths_b, key) -> Int[Array, "b steps"]:
    decoder = nnx.merge(graphdef, params)
    batch, width = prompts_bt.shape
    cache = KVCache.empty(decoder.config, batch, width + settings.max_new_tokens, decoder.dtype)
    output = decoder(prompts_bt, cache=cache)
    # Slots of padding lie behind each sequence's length: hidden by the mask until real tokens overwrite them.
    cache = output.cache._replace(length=lengths_b)
    last_bd = jnp.take_along_axis(output.normed, lengths_b[:, None, None] - 1, axis=1)[:, 0]
    key, first = jax.random.split(key)

    def choose(normed_bd, key) -> Int[Array, " b"]:
        logits_bv = decoder.logits(normed_bd)
        if settings.temperature == 0:
            return jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits_bv / settings.temperature).astype(jnp.int32)

    def stopped(tokens_b) -> Bool[Array, " b"]:
        return jnp.zeros(batch, bool) if settings.end_token is None else tokens_b == settings.end_token

    def going(progress: _Progress) -> Bool[Array, ""]:
        return (progress.step < settings.max_new_tokens) & ~jnp.all(progress.done)

    def advance(progress: _Progress) -> _Progress:
        previous_b = jax.lax.dynamic_index_in_dim(progress.made, progress.step - 1, axis=1, keepdims=False)
        output = decoder(previous_b[:, None], cache=progress.cache)
        key, now = jax.random.split(progress.key)
        tokens_b = jnp.where(progress.done, previous_b, choose(output.normed[:, 0], now))
        made = jax.lax.dynamic_update_index_in_dim(progress.made, tokens_b, progress.step, axis=1)
        return _Progress(output.cache, made, progress.done | stopped(tokens_b), progress.step + 1, key)

    tokens_b = choose(last_bd, first)
    made = jnp.zeros((batch, settings.max_new_tokens), jnp.int32).at[:, 0].set(tokens_b)
    start = _Progress(cache, made, stopped(tokens_b), jnp.int32(1), key)
    return jax.lax.while_loop(going, advance, start).made
