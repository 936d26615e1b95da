"""The decoder that serves every supported family, in Flax NNX.

Attribute names are those of the Hugging Face checkpoints, so that a parameter's path *is* its tensor's name
(checkpoint.py). The layers are one stacked module that `jax.lax.scan` runs through: compilation takes the same time
for 8 layers and for 80, and the scan's outputs are the hidden states of all layers. Call it inside `jit`: outside, each
call compiles its scan again. Everything computes in the dtype of the parameters.

Letters: `b` sequences, `T` tokens, `S` cache slots, `N` layers, `D` features, `H`/`K` query/key heads, `V` vocabulary.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from layerwave.targets.config import DecoderConfig
from layerwave.targets.experts import ACTIVATIONS, MixtureOfExperts
from layerwave.targets.rope import rotate, rotation

PARTITION = {
    "embed_tokens": ("rows", None),
    "lm_head": ("rows", None),
    "q_proj": ("columns", "num_heads"),
    "k_proj": ("columns", "num_kv_heads"),
    "v_proj": ("columns", "num_kv_heads"),
    "o_proj": ("rows", "num_heads"),
    "gate_proj": ("columns", None),
    "up_proj": ("columns", None),
    "down_proj": ("rows", None),
}
"""Which side of a module's matrix a mesh's `model` axis cuts: columns make pieces, rows take them. The pieces are
heads, whose number is this field of the config, or single rows and columns. Modules that are not here are whole on
every device, and so are those whose number of pieces the axis does not divide, such as 2 key heads among 4 devices."""

QUERY_BLOCK, QUERY_BLOCKS = 128, 16
"""Least queries in a block of `causal_attention`, and most blocks: each is compiled by itself."""


class KVCache(NamedTuple):
    """Keys and values of all layers, and how many slots each sequence has filled. A plain pytree: copy it to branch.

    A forward pass only reads it and leaves the keys and values of its own tokens beside it, so that a caller takes over
    those that count, and a compiled loop never copies the whole.
    """

    keys: Float[Array, "N b S K head_dim"]
    values: Float[Array, "N b S K head_dim"]
    length: Int[Array, " b"]

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int, slots: int, dtype: DTypeLike) -> "KVCache":
        shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    @property
    def filled(self) -> Bool[Array, "b 1 S"]:
        """Which slots a query sees: the same for all of a sequence."""
        return jnp.arange(self.keys.shape[2], dtype=jnp.int32)[None, None, :] < self.length[:, None, None]

    def extended(
        self, keys: Float[Array, "N b T K head_dim"], values: Float[Array, "N b T K head_dim"], counts: Int[Array, " b"]
    ) -> "KVCache":
        """With T more tokens behind those of each sequence, of which the first `counts` are filled from now on.

        The caller sees to it that `length + T` fits the slots.
        """
        rows = jnp.arange(keys.shape[1], dtype=jnp.int32)[:, None]
        slots = self.length[:, None] + jnp.arange(keys.shape[2], dtype=jnp.int32)[None, :]
        keys, values = (
            held.at[:, rows, slots].set(new, unique_indices=True)
            for held, new in ((self.keys, keys), (self.values, values))
        )
        return KVCache(keys, values, self.length + counts)

    def widened(self, slots: int) -> "KVCache":
        """The same with more slots."""
        more = ((0, 0), (0, 0), (0, slots - self.keys.shape[2]), (0, 0), (0, 0))
        return KVCache(jnp.pad(self.keys, more), jnp.pad(self.values, more), self.length)


class DecoderOutput(NamedTuple):
    """What one forward pass leaves.

    states: residual stream after each layer; the last one is taken *before* the final norm.
    normed: the last state after the final norm, which is what the head reads.
    keys, values: of the tokens, in each layer, if a cache was given; what `KVCache.extended` takes.
    """

    states: Float[Array, "N b T D"]
    normed: Float[Array, "b T D"]
    keys: Float[Array, "N b T K head_dim"] | None
    values: Float[Array, "N b T K head_dim"] | None


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32 whatever the dtype of its input. `offset` is added to the weight."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full(size, 1.0 - offset, dtype))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (x32 * (scale + self.offset)).astype(x.dtype)


def matmul_precision(dtype: DTypeLike):
    """Context in which products of `dtype` are as exact as it: accelerators multiply float32 in TF32 or bfloat16
    unless told otherwise."""
    return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


class Keys(NamedTuple):
    """Keys with their values, and which of them each query sees."""

    keys: Float[Array, "b S K head_dim"]
    values: Float[Array, "b S K head_dim"]
    mask: Bool[Array, "b #T S"]


def attend(q_bthd: Float[Array, "b T H head_dim"], *seen: Keys) -> Float[Array, "b T H head_dim"]:
    """Softmax attention over several blocks of keys; each key head serves `H // K` query heads.

    Scores and softmax are float32. Every query must see at least one key.
    """
    batch, length, _, head_dim = q_bthd.shape
    grouped = q_bthd.reshape(batch, length, seen[0].keys.shape[2], -1, head_dim)
    scores = []
    for block in seen:
        logits = jnp.einsum("btkgd,bskd->bkgts", grouped, block.keys, preferred_element_type=jnp.float32)
        scores.append(jnp.where(block.mask[:, None, None], logits / head_dim**0.5, jnp.finfo(jnp.float32).min))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    mixed, start = 0.0, 0
    for block in seen:
        stop = start + block.keys.shape[1]
        share = weights[..., start:stop].astype(block.values.dtype)
        mixed, start = mixed + jnp.einsum("bkgts,bskd->btkgd", share, block.values), stop
    return mixed.reshape(q_bthd.shape)


def masked_attention(mask_bts: Bool[Array, "b #T T"], *before: Keys):
    """The attention of a layer: from rotated queries, keys and values to (mixed values, (keys, values)).

    `mask_bts`: which of each other the new tokens see. `before`: what they see besides.
    """

    def attention(q_bthd, k_btkd, v_btkd):
        return attend(q_bthd, *before, Keys(k_btkd, v_btkd, mask_bts)), (k_btkd, v_btkd)

    return attention


def query_block(length: int) -> int:
    """Queries in a block of `causal_attention`."""
    return max(QUERY_BLOCK, -(-length // QUERY_BLOCKS))


def causal_attention(mask_bts: Bool[Array, "b T T"]):
    """The same for whole sequences and a mask in which no token sees a later one.

    Queries go in blocks, each with the keys up to its own end: half of the scores, and one block of them in memory.
    """

    def attention(q_bthd, k_btkd, v_btkd):
        length = q_bthd.shape[1]
        size = query_block(length)
        ends = [(start, min(start + size, length)) for start in range(0, length, size)]
        mixed = [
            attend(q_bthd[:, start:end], Keys(k_btkd[:, :end], v_btkd[:, :end], mask_bts[:, start:end, :end]))
            for start, end in ends
        ]
        return jnp.concatenate(mixed, axis=1), (k_btkd, v_btkd)

    return attention


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; optional biases (Qwen2) and query/key norms (Qwen3, OLMo 2).

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
        sizes = (query_size, key_size) if config.qk_norm_width else (config.head_dim, config.head_dim)
        norms = (RMSNorm(size, config.norm_eps, dtype, config.norm_offset) for size in sizes)
        self.q_norm, self.k_norm = norms if config.qk_norm else (None, None)
        self.qk_norm_width = config.qk_norm_width
        # Scores are divided by the square root of head_dim later.
        self.query_scale = (config.head_dim / (config.query_pre_attn_scalar or config.head_dim)) ** 0.5

    def __call__(self, x_btd, turn, attention):
        """`attention`: what the queries see (see `masked_attention`). Returns the output and what it hands on."""

        def heads(projection: nnx.Linear, norm: RMSNorm | None = None) -> Float[Array, "b T heads head_dim"]:
            x = projection(x_btd)
            x = norm(x) if norm is not None and self.qk_norm_width else x
            x = x.reshape(*x.shape[:2], -1, self.head_dim)
            return norm(x) if norm is not None and not self.qk_norm_width else x

        q_bthd, k_btkd, v_btkd = heads(self.q_proj, self.q_norm), heads(self.k_proj, self.k_norm), heads(self.v_proj)
        q_bthd = rotate(q_bthd, *turn) * self.query_scale
        mixed_bthd, kept = attention(q_bthd, rotate(k_btkd, *turn), v_btkd)
        return self.o_proj(mixed_bthd.reshape(*x_btd.shape[:2], -1)), kept


class MLP(nnx.Module):
    """Gated linear unit: SwiGLU, or GeGLU (Gemma)."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=config.mlp_bias, param_dtype=dtype, rngs=rngs)

        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)
        self.activation = config.activation

    def __call__(self, x_btd: Float[Array, "b T D"]) -> Float[Array, "b T D"]:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x_btd)) * self.up_proj(x_btd))


# Before and after the attention, before and after the MLP.
_NORMS = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


class DecoderLayer(nnx.Module):
    """Attention and MLP, each added to the residual stream; their inputs, their outputs or both are normed."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.norms = config.norms
        for name in filter(None, _NORMS[config.norms]):
            setattr(self, name, RMSNorm(config.hidden_size, config.norm_eps, dtype, config.norm_offset))
        self.self_attn = Attention(config, dtype, rngs)
        self.mlp = MLP(config, dtype, rngs) if config.experts is None else MixtureOfExperts(config, dtype, rngs)

    def __call__(self, x_btd, turn, attention):
        into_attention, out_of_attention, into_mlp, out_of_mlp = (
            (lambda x: x) if name is None else getattr(self, name) for name in _NORMS[self.norms]
        )
        attended, kept = self.self_attn(into_attention(x_btd), turn, attention)
        x_btd = x_btd + out_of_attention(attended)
        return x_btd + out_of_mlp(self.mlp(into_mlp(x_btd))), kept


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
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, config.norm_offset)
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
            # The table first: with a few tokens on a CPU, half the time that it takes as the second factor.
            logits = jnp.einsum("vd,...d->v...", self.head_weight(), normed, preferred_element_type=jnp.float32)
            return jnp.moveaxis(logits, 0, -1)

    def __call__(
        self,
        tokens: Int[Array, "b T"],
        *,
        positions: Int[Array, "b T"] | None = None,
        mask: Bool[Array, "b T T"] | None = None,
        cache: KVCache | None = None,
        lengths: Int[Array, " b"] | None = None,
    ) -> DecoderOutput:
        """One forward pass.

        Without a cache the tokens are whole sequences, right-padded if their lengths differ: attention is causal, so
        padding never reaches a real position. With a cache they follow what it holds, and see all of it.

        Args:
          tokens: token ids.
          positions: rotary positions; by default 0, 1, … after what the cache holds.
          mask: which of the tokens each of them sees, without a cache none after it; by default itself and those
            before it.
          lengths: tokens of each sequence, for rotations that depend on it (dynamic, longrope); by default all that
            are there, padding included. With a cache it must not change from call to call.
        """
        batch, length = tokens.shape
        order = jnp.arange(length, dtype=jnp.int32)[None, :]
        if positions is None:
            start = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
            positions = start[:, None] + order
        if mask is None:
            mask = jnp.broadcast_to(order <= order.T, (batch, length, length))
        if lengths is None:
            lengths = jnp.full(batch, length, jnp.int32) if cache is None else cache.length + length
        view = self._view(positions, mask, cache, lengths)
        layer_def, layer_params = nnx.split(self.layers)

        def run(x_btd, xs):
            params, slides, *held = xs
            turn, mask, filled = view(slides)
            before = () if cache is None else (Keys(*held, filled),)
            attention = masked_attention(mask, *before) if before else causal_attention(mask)
            x_btd, kept = nnx.merge(layer_def, params)(x_btd, turn, attention)
            # Without a cache the keys die here; returning them would keep N x b x T of them alive.
            return x_btd, (x_btd, *((None, None) if cache is None else kept))

        held = () if cache is None else (cache.keys, cache.values)
        with matmul_precision(self.dtype):
            embedded = self.embed_tokens(tokens) * self.config.embed_scale
            slides = jnp.array(self.config.sliding_layers or [False] * self.config.num_layers)
            x_btd, (states, keys, values) = jax.lax.scan(run, embedded, (layer_params, slides, *held))
        return DecoderOutput(states, self.norm(x_btd), keys, values)

    def _view(self, positions, mask, cache, lengths):
        """Rotation and masks of a layer (of the new tokens, and of the cache's slots), as a function of whether it
        slides.

        A window counts positions and not slots: nodes of a tree lie behind each other, and next to each other.
        """
        config, filled = self.config, None if cache is None else cache.filled
        full = rotation(positions, config.rope, config.head_dim, lengths), mask, filled
        if not any(config.sliding_layers):
            return lambda slides: full

        def near(held):
            return positions[:, :, None] - held[:, None, :] < config.sliding_window

        if cache is not None:
            slots = jnp.arange(filled.shape[2], dtype=jnp.int32)[None, :]
            full = *full[:2], jnp.broadcast_to(filled, (*tuple(positions.shape), slots.shape[1]))
            filled = filled & near(slots)
        local = (
            rotation(positions, config.local_rope or config.rope, config.head_dim, lengths),
            mask & near(positions),
            filled,
        )
        if all(config.sliding_layers):
            return lambda slides: local
        return lambda slides: jax.tree.map(partial(jnp.where, slides), local, full)
