"""The decoder that serves every supported family, in Flax NNX.

Attribute names are those of the Hugging Face checkpoints, so that a parameter's path *is* its tensor's name
(checkpoint.py). The layers are one stacked module that `jax.lax.scan` runs through: compilation takes the same time
for 8 layers and for 80, and the scan's outputs are the hidden states of all layers. Call it inside `jit`: outside, each
call compiles its scan again. Everything computes in the dtype of the parameters.

Letters: `b` sequences, `T` tokens, `S` cache slots, `N` layers, `D` features, `H`/`K` query/key heads, `V` vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from layerwave.targets.config import DecoderConfig
from layerwave.targets.rope import rotate, rotation

QUERY_BLOCK, QUERY_BLOCKS = 128, 16
"""Least queries in a block of `causal_attention`, and most blocks: each is compiled by itself."""


class KVCache(NamedTuple):
    """Keys and values of all layers, and how many slots each sequence has filled. A plain pytree: copy it to branch."""

    keys: Float[Array, "N b S K head_dim"]
    values: Float[Array, "N b S K head_dim"]
    length: Int[Array, " b"]

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> "KVCache":
        shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))


class DecoderOutput(NamedTuple):
    """What one forward pass leaves.

    states: residual stream after each layer; the last one is taken *before* the final norm.
    normed: the last state after the final norm, which is what the head reads.
    cache: the cache with the new tokens in it, if one was given.
    """

    states: Float[Array, "N b T D"]
    normed: Float[Array, "b T D"]
    cache: KVCache | None


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32 whatever the dtype of its input."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return scale * x32.astype(x.dtype)


def matmul_precision(dtype: DTypeLike):
    """Context in which products of `dtype` are as exact as it: accelerators multiply float32 in TF32 or bfloat16
    unless told otherwise."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def attend(
    q_bthd: Float[Array, "b T H head_dim"],
    k_bskd: Float[Array, "b S K head_dim"],
    v_bskd: Float[Array, "b S K head_dim"],
    mask_bts: Bool[Array, "b T S"],
) -> Float[Array, "b T H head_dim"]:
    """Softmax attention; each key head serves `H // K` query heads. Scores and softmax are float32.

    Every query must see at least one slot.
    """
    batch, length, _, head_dim = q_bthd.shape
    grouped = q_bthd.reshape(batch, length, k_bskd.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k_bskd, preferred_element_type=jnp.float32) / head_dim**0.5
    scores = jnp.where(mask_bts[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_bskd.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v_bskd).reshape(q_bthd.shape)


def masked_attention(mask_bts, cached=None):
    """The attention of a layer: from rotated queries, keys and values to (mixed values, (keys, values)).

    `cached`: None, or the layer's keys, values and first slot to write; the new ones go to it and are seen with it.
    """

    def attention(q_bthd, k_btkd, v_btkd):
        if cached is not None:
            keys, values, start_b = cached
            write = jax.vmap(lambda buffer, new, start: jax.lax.dynamic_update_slice(buffer, new, (start, 0, 0)))
            k_btkd, v_btkd = write(keys, k_btkd, start_b), write(values, v_btkd, start_b)
        return attend(q_bthd, k_btkd, v_btkd, mask_bts), (k_btkd, v_btkd)

    return attention


def causal_attention(mask_bts: Bool[Array, "b T T"]):
    """The same for whole sequences and a mask in which no token sees a later one.

    Queries go in blocks, each with the keys up to its own end: half of the scores, and one block of them in memory.
    """

    def attention(q_bthd, k_btkd, v_btkd):
        length = q_bthd.shape[1]
        size = max(QUERY_BLOCK, -(-length // QUERY_BLOCKS))
        ends = [(start, min(start + size, length)) for start in range(0, length, size)]
        mixed = [
            attend(q_bthd[:, start:end], k_btkd[:, :end], v_btkd[:, :end], mask_bts[:, start:end, :end])
            for start, end in ends
        ]
        return jnp.concatenate(mixed, axis=1), (k_btkd, v_btkd)

    return attention


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; optional biases (Qwen2) and query/key norms (Qwen3).

    `input_size`: of what is projected, where it is not the hidden size (the draft's layer reads two vectors).
    """

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs, input_size: int | None = None):
        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, param_dtype=dtype, rngs=rngs)

        input_size = input_size or config.hidden_size
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = linear(input_size, query_size, config.qkv_bias)
        self.k_proj = linear(input_size, key_size, config.qkv_bias)
        self.v_proj = linear(input_size, key_size, config.qkv_bias)
        self.o_proj = linear(query_size, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, dtype) if config.qk_norm else None

    def __call__(self, x_btd, turn, attention):
        """`attention`: what the queries see (see `masked_attention`). Returns the output and what it hands on."""
        q_bthd, k_btkd, v_btkd = (
            projection(x_btd).reshape(*x_btd.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            q_bthd, k_btkd = self.q_norm(q_bthd), self.k_norm(k_btkd)
        mixed_bthd, kept = attention(rotate(q_bthd, *turn), rotate(k_btkd, *turn), v_btkd)
        return self.o_proj(mixed_bthd.reshape(*x_btd.shape[:2], -1)), kept


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=config.mlp_bias, param_dtype=dtype, rngs=rngs)

        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x_btd: Float[Array, "b T D"]) -> Float[Array, "b T D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x_btd)) * self.up_proj(x_btd))


class DecoderLayer(nnx.Module):
    """Attention and MLP, each on a normed copy of the residual stream and added to it."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x_btd, turn, attention):
        attended, kept = self.self_attn(self.input_layernorm(x_btd), turn, attention)
        x_btd = x_btd + attended
        return x_btd + self.mlp(self.post_attention_layernorm(x_btd)), kept


class Decoder(nnx.Module):
    """Token ids in, hidden states of every layer out."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        def embedding() -> nnx.Embed:
            return nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype, rngs)

        self.config = config
        self.embed_tokens = embedding()
        self.layers = stacked(rngs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.lm_head = None if config.tie_embeddings else embedding()

    @property
    def dtype(self) -> jnp.dtype:
        return self.embed_tokens.embedding.dtype

    def head_weight(self) -> Float[Array, "V D"]:
        """The output head: the embedding itself when they are tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).embedding[...]

    def logits(self, normed: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Next-token logits of final-normed states, float32."""
        with matmul_precision(self.dtype):
            return jnp.einsum("...d,vd->...v", normed, self.head_weight(), preferred_element_type=jnp.float32)

    def __call__(
        self,
        tokens: Int[Array, "b T"],
        *,
        positions: Int[Array, "b T"] | None = None,
        mask: Bool[Array, "b T S"] | None = None,
        cache: KVCache | None = None,
    ) -> DecoderOutput:
        """One forward pass.

        Without a cache the tokens are whole sequences, right-padded if their lengths differ: attention is causal, so
        padding never reaches a real position. With a cache they follow what it holds, and go to its next slots.

        Args:
          tokens: token ids.
          positions: rotary positions; by default 0, 1, … after what the cache holds.
          mask: which key slots each query sees; by default itself and everything before it.
          cache: keys and values so far. The caller sees to it that `length + T` fits its slots.
        """
        batch, length = tokens.shape
        start = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
        slots = length if cache is None else cache.keys.shape[2]
        order = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
        if positions is None:
            positions = order
        causal = mask is None and cache is None
        if mask is None:
            mask = jnp.arange(slots, dtype=jnp.int32)[None, None, :] <= order[:, :, None]
        turn = rotation(positions, self.config.rope.frequencies(self.config.head_dim))
        layer_def, layer_params = nnx.split(self.layers)

        def run(x_btd, xs):
            params, keys, values = xs
            cached = None if cache is None else (keys, values, start)
            attention = causal_attention(mask) if causal else masked_attention(mask, cached)
            x_btd, (keys, values) = nnx.merge(layer_def, params)(x_btd, turn, attention)
            # Without a cache the keys die here; returning them would keep N x b x T of them alive.
            return x_btd, (x_btd, None if cache is None else (keys, values))

        cached = (None, None) if cache is None else (cache.keys, cache.values)
        with matmul_precision(self.dtype):
            x_btd, (states, written) = jax.lax.scan(run, self.embed_tokens(tokens), (layer_params, *cached))
        if cache is not None:
            cache = KVCache(*written, cache.length + length)
        return DecoderOutput(states, self.norm(x_btd), cache)
