"""The EAGLE-3 draft: one decoder layer that reads a few of the target's hidden states.

Slot t takes the embedding of token t + 1 and the features `g_t` of position t, and predicts token t + 2. In the first
step `g_t = fc(concat(h_l(t), l in layers))`; in later ones it is the draft's own output (`feedback`).

Attribute names are those of the published checkpoints (EAGLE, SpecForge, SGLang), so that a parameter's path *is* its
tensor's name (checkpoint.py). The embedding is the target's and not part of the draft: many drafts share one table.
The module does not know *which* layers it reads, only how many: drafts of one width share a graph definition, so they
share compiled code and can be vmapped.

Letters: `b` sequences, `T` slots, `m` layers read, `D` width of the target, `d` width of the draft, `Vd` draft tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Key

from layerwave.drafts.config import DraftConfig
from layerwave.drafts.vocabulary import DraftVocabulary
from layerwave.errors import LayerwaveError
from layerwave.targets import Target
from layerwave.targets.decoder import MLP, Attention, RMSNorm, masked_attention, matmul_precision
from layerwave.targets.rope import rotation


class DraftLayer(nnx.Module):
    """A decoder layer whose attention reads `[embedding, features]` and whose residual stream is the features."""

    def __init__(self, config: DraftConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        layer, size, eps = config.layer_config(), config.hidden_size, config.norm_eps
        self.hidden_norm = RMSNorm(size, eps, dtype)
        self.input_layernorm = RMSNorm(size, eps, dtype)
        self.self_attn = Attention(layer, dtype, rngs, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype)
        self.mlp = MLP(layer, dtype, rngs)
        self.norm_before_residual = config.norm_before_residual

    def __call__(self, embedded, features, turn, attention):
        normed = self.hidden_norm(features)
        inputs = jnp.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        attended, kept = self.self_attn(inputs, turn, attention)
        out = (normed if self.norm_before_residual else features) + attended
        return out + self.mlp(self.post_attention_layernorm(out)), kept


class Eagle3(nnx.Module):
    """The draft's parameters and the parts of a step. Computes in the dtype of the parameters."""

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        size, read = config.target_hidden_size, len(config.layers) * config.target_hidden_size
        self.fc = nnx.Linear(read, config.hidden_size, use_bias=False, param_dtype=dtype, rngs=rngs)
        norms = [RMSNorm(size, config.norm_eps, dtype) for _ in config.layers]
        self.fc_norm = nnx.List(norms) if config.fc_norm else None
        self.input_norm = RMSNorm(read, config.norm_eps, dtype) if config.norm_before_fc else None
        self.midlayer = DraftLayer(config, dtype, rngs)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)
        self.lm_head = nnx.Embed(config.draft_vocab_size, config.hidden_size, param_dtype=dtype, rngs=rngs)
        self.norm_output = config.norm_output
        self.rope = config.rope
        self.key_shape = (config.num_kv_heads, config.head_dim)

    @property
    def dtype(self) -> jnp.dtype:
        return self.lm_head.embedding.dtype

    def fuse(self, states: Float[Array, "m b T D"]) -> Float[Array, "b T d"]:
        """Features of the first step, from the states of the layers in ascending order."""
        states = states.astype(self.dtype)
        slices = list(states) if self.fc_norm is None else [n(s) for n, s in zip(self.fc_norm, states, strict=True)]
        joined = jnp.concatenate(slices, axis=-1)
        with matmul_precision(self.dtype):
            return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def block(
        self, embedded: Float[Array, "b T d"], features: Float[Array, "b T d"], positions: Int[Array, "b T"], attention
    ) -> tuple[Float[Array, "b T d"], Any]:
        """The decoder layer.

        Args:
          embedded: the target's embedding of token t + 1 in slot t.
          features: from `fuse` in the first step, from `feedback` later.
          positions: rotary positions of the slots: t in the first step, one more in each later step.
          attention: what the queries see. From rotated queries `(b, T, H, head_dim)` and keys, and values
            `(b, T, K, head_dim)`, to the mixed values and anything that the caller wants to keep of them: the
            keys and values of earlier slots or steps, a cache and a tree mask are the caller's
            (`layerwave.targets.decoder.masked_attention` is one for a mask with or without a cache).

        Returns:
          The output before the final norm, and what `attention` kept.
        """
        turn = rotation(positions, self.rope, self.key_shape[1])
        with matmul_precision(self.dtype):
            return self.midlayer(embedded.astype(self.dtype), features.astype(self.dtype), turn, attention)

    def logits(self, out: Float[Array, "b T d"]) -> Float32[Array, "b T Vd"]:
        """Logits over the draft vocabulary of a block's output, float32."""
        with matmul_precision(self.dtype):
            head = self.lm_head.embedding[...]
            return jnp.einsum("btd,vd->btv", self.norm(out), head, preferred_element_type=jnp.float32)

    def feedback(self, out: Float[Array, "b T d"]) -> Float[Array, "b T d"]:
        """Features of the next step, from a block's output."""
        return self.norm(out) if self.norm_output else out

    def __call__(self, embedded: Float[Array, "b T d"], states: Float[Array, "m b T D"]) -> Float32[Array, "b T Vd"]:
        """Logits of the first step over whole sequences: every slot sees itself and those before it."""
        batch, length = embedded.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
        mask = positions[:, None, :] <= positions[:, :, None]
        out, _ = self.block(embedded, self.fuse(states), positions, masked_attention(mask))
        return self.logits(out)


@dataclass(frozen=True, eq=False)
class Draft:
    """A draft and what it belongs to."""

    config: DraftConfig
    module: Eagle3
    vocabulary: DraftVocabulary
    target_fingerprint: str
    target_name: str

    def __post_init__(self) -> None:
        sizes = (self.config.vocab_size, self.config.draft_vocab_size)
        if sizes != (self.vocabulary.target_size, self.vocabulary.size):
            raise LayerwaveError(
                f"the draft's config speaks of {sizes[1]} of {sizes[0]} tokens, its vocabulary of "
                f"{self.vocabulary.size} of {self.vocabulary.target_size}: they belong to different drafts"
            )


def initial_draft(
    target: Target,
    layers: tuple[int, ...],
    vocabulary: DraftVocabulary,
    key: Key[Array, ""],
    dtype: DTypeLike = jnp.float32,
    **options: Any,
) -> Draft:
    """An untrained draft: its head is the target's on the draft vocabulary, all else fan-in normal from `key`.

    Args:
      layers: 0-based layer outputs of the target.
      key: drafts of equal sizes from one key differ in nothing, those of different widths in `fc` only.
      options: fields of `DraftConfig` that shall not be the target's.

    Raises:
      LayerwaveError: layers, vocabulary or options that do not fit the target.
    """
    config = DraftConfig.from_target(target.config, layers, vocabulary.size, **options)
    if config.hidden_size != config.target_hidden_size:
        raise LayerwaveError(
            f"a draft of width {config.hidden_size} cannot take embedding and head of a target of width "
            f"{config.target_hidden_size}: leave hidden_size out"
        )
    module = Eagle3(config, dtype=dtype, rngs=nnx.Rngs(key))
    module.lm_head.embedding[...] = vocabulary.restrict(target.decoder.head_weight()).astype(dtype)
    return Draft(config, module, vocabulary, target.fingerprint, target.name)


def require_target(draft: Draft, target: Target) -> None:
    """Raises `LayerwaveError` unless the draft was made for this very target."""
    if draft.target_fingerprint != target.fingerprint:
        raise LayerwaveError(
            f"the draft was made for the target {draft.target_name!r} (fingerprint {draft.target_fingerprint[:12]}), "
            f"got {target.name!r} ({target.fingerprint[:12]}): load that target, or train a draft for this one"
        )
