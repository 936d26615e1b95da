"""How the supported model types differ from the common decoder, as data.

What is said here about a family is what its reference implementation does and its files do not say; what they say is
read by config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Norms = Literal["pre", "post", "both"]
"""Of attention and MLP: their inputs, their outputs, or both."""


@dataclass(frozen=True)
class TensorNames:
    """How a family's files name and cut the decoder's parameters, where they do not follow the module's paths.

    parts: parts of a name. fused: the tensor that holds the rows of several parameters, in this order.
    roots: what stands before the decoder's names, and the name of its head; several where it is a part of a larger
    model that is written in several ways, the usual one first. towers: the other parts of that model.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    roots: Mapping[str, str] = field(default_factory=lambda: {"model.": "lm_head"})
    towers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """How a model type differs from the common decoder."""

    architecture: str
    """The class that reads it in transformers, vLLM and SGLang."""
    qkv_bias: bool | None = None
    """None: the config's `attention_bias` decides, and then the output projection has a bias as well."""
    qk_norm: Literal["head", "width"] | None = None
    """Norm queries and keys: each head by itself, or all heads as one vector."""
    norms: Norms = "pre"
    norm_offset: float = 0.0
    """Added to a norm's weight."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of their size."""
    window: Literal["set", "told"] | None = None
    """Whether there is a sliding window: where the config sets one, or only if `use_sliding_window` tells to use it."""
    slides: Literal["all", "upper", "periodic"] = "all"
    """Layers with the window, if the config has no `layer_types`: all, those from `max_window_layers` on, or all but
    every `sliding_window_pattern`-th."""
    local_rope: tuple[float, float] | None = None
    """Layers with the window have a rotation of their own: what the bases of the others and of these are by default."""
    partial_rotary: bool = False
    rope_names: Mapping[str, str] = field(default_factory=dict)
    """Kinds of RoPE that old files of this family call otherwise."""
    experts: Literal["mixtral", "qwen"] | None = None
    """Whose keys describe the mixture of experts."""
    keys: frozenset[str] = frozenset()
    """Keys that only this family has."""
    nested: frozenset[str] | None = None
    """The decoder is described in `text_config`; these keys beside it describe what a text does not go through."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What published configs of this family leave out, since its implementation has it as default."""
    tensors: TensorNames = TensorNames()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GEMMA3: dict[str, Any] = {
    "qk_norm": "head",
    "norms": "both",
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "window": "set",
    "slides": "periodic",
    "local_rope": (1e6, 1e4),
    "keys": _words("hidden_activation query_pre_attn_scalar sliding_window_pattern rope_local_base_freq"),
    "defaults": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
    },
}

FAMILIES = {
    "gemma3_text": Family("Gemma3ForCausalLM", **_GEMMA3),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        **_GEMMA3,
        nested=_words("vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index"),
        tensors=TensorNames(
            roots={"language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head"},
            towers=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
        ),
    ),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window="set"),
    "mixtral": Family(
        "MixtralForCausalLM",
        window="set",
        experts="mixtral",
        keys=_words("num_local_experts num_experts_per_tok"),
        tensors=TensorNames(
            parts={"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
        ),
    ),
    "olmo2": Family("Olmo2ForCausalLM", qk_norm="width", norms="post"),
    "phi3": Family(
        "Phi3ForCausalLM",
        window="set",
        partial_rotary=True,
        rope_names={"su": "longrope", "yarn": "longrope"},
        keys=_words("partial_rotary_factor original_max_position_embeddings"),
        tensors=TensorNames(
            fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        ),
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window="told", slides="upper"),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm="head", window="told", slides="upper"),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        qk_norm="head",
        window="told",
        experts="qwen",
        keys=_words("num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob"),
    ),
}
