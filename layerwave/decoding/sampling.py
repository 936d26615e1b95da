"""How the next token follows from logits: the one place that plain and speculative decoding share.

Each token has a key of its own, made from its sequence's key and its place in the answer. So a token is a function of
the logits and its place, whoever computed the logits and in which round.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32, Key

from layerwave.errors import LayerwaveError


@dataclass(frozen=True)
class Sampler:
    """Temperature, then top-k, then top-p. Raises `LayerwaveError` for values out of range."""

    temperature: float = 0.0
    """0 is greedy; greater values sample from the distribution sharpened or flattened by it."""
    top_k: int | None = None
    """Sample from the k most probable tokens only, and what ties with the last of them."""
    top_p: float = 1.0
    """Sample from the fewest most probable tokens only that have this probability together, and what ties with the last
    of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise LayerwaveError(f"temperature is {self.temperature}, expected a finite number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise LayerwaveError(f"top_k is {self.top_k}, expected at least 1, or None to leave it out")
        if not 0 < self.top_p <= 1:
            raise LayerwaveError(f"top_p is {self.top_p}, expected a number above 0 and at most 1")

    def warp(self, logits: Float32[Array, "*batch V"]) -> Float32[Array, "*batch V"]:
        """Logits of the distribution that is sampled at a temperature above 0; tokens that were cut have -inf."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        if self.top_p < 1:
            descending = jnp.sort(logits, axis=-1, descending=True)
            probabilities = jax.nn.softmax(descending, axis=-1)
            kept = jnp.cumsum(probabilities, axis=-1) - probabilities < self.top_p
            least = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return logits

    def draw(
        self, logits: Float32[Array, "b V"], keys: Key[Array, " b"], places: Int[Array, " b"]
    ) -> Int32[Array, " b"]:
        """The token at each sequence's place in its answer (0 is the first). Greedy: the most probable one, of equal
        ones the lowest id."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        keys = jax.vmap(jax.random.fold_in)(keys, places)
        return jax.vmap(jax.random.categorical)(keys, self.warp(logits)).astype(jnp.int32)


@dataclass(frozen=True)
class GenerationSettings:
    """How to continue prompts. Raises `LayerwaveError` for values out of range."""

    max_new_tokens: int = 256
    """Tokens to make at most, the end token included."""
    temperature: float = 0.0
    """0 is greedy; greater values sample from the distribution sharpened or flattened by it."""
    end_token: int | tuple[int, ...] | None = None
    """Token, or any of several, after which a sequence stops; None: it runs to max_new_tokens."""
    top_k: int | None = None
    """See `Sampler`."""
    top_p: float = 1.0
    """See `Sampler`."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise LayerwaveError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")
        Sampler(self.temperature, self.top_k, self.top_p)

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.temperature, self.top_k, self.top_p)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        if self.end_token is None:
            return ()
        return (self.end_token,) if isinstance(self.end_token, int) else self.end_token
