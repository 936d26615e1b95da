"""What a decoder needs to know, read from a Hugging Face `config.json`.

A key may be absent only where the checkpoint's tensors would contradict a wrong guess (`head_dim`,
`num_key_value_heads`, biases, tying). What the shapes cannot show (`rope_theta`, `rms_norm_eps`) is required, and a key
that this decoder does not know is an error: most silent faults of ports are a key that was ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerwave.errors import LayerwaveError
from layerwave.targets.rope import Rope


@dataclass(frozen=True)
class Family:
    """How a model type differs from the common decoder."""

    qk_norm: bool = False
    qkv_bias: bool | None = None
    """None: the config's `attention_bias` decides, and then the output projection has a bias as well."""


FAMILIES = {"llama": Family(), "qwen2": Family(qkv_bias=True), "qwen3": Family(qk_norm=True)}

# Keys that this file reads.
_READ = frozenset(
    """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters attention_bias
    mlp_bias use_sliding_window sliding_window layer_types tie_word_embeddings""".split()
)
# Keys that change nothing in a forward pass in evaluation: bookkeeping, training, and generation settings of old files.
_NEUTRAL = frozenset(
    """architectures dtype torch_dtype transformers_version use_cache initializer_range bos_token_id eos_token_id
    pad_token_id attention_dropout pretraining_tp max_window_layers auto_map transformers.js_config
    neftune_noise_alpha unsloth_version unsloth_fixed output_attentions
    output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type
    max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size num_return_sequences""".split()
)
# Keys that change nothing as long as they say this.
_NEUTRAL_IF = {"use_mrope": False, "rope_interleaved": False, "is_llama_config": True}


@dataclass(frozen=True)
class DecoderConfig:
    """Static description of a decoder; everything the forward pass depends on besides the parameters."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, has_head: bool | None = None) -> "DecoderConfig":
        """Reads the content of a `config.json`.

        Args:
          raw: the parsed file; `rope_theta`/`rope_scaling` (transformers 4) and `rope_parameters` (5) are understood.
          has_head: whether the checkpoint holds `lm_head.weight`; decides about tying where the file is silent.

        Raises:
          LayerwaveError: unsupported architecture, missing key, or a key whose meaning this decoder does not implement.
        """
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise LayerwaveError(
                f"config.json: model_type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
            )
        family = FAMILIES[model_type]
        _refuse_unknown(raw)
        num_heads, hidden_size, num_layers = (
            _count(raw, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
        _refuse_unimplemented(raw, num_layers)
        attention_bias = bool(raw.get("attention_bias", False))
        tied = raw.get("tie_word_embeddings")
        if tied is None:
            if has_head is None:
                raise LayerwaveError("config.json: tie_word_embeddings is missing; add true or false")
            tied = not has_head
        kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % kv_heads:
            raise LayerwaveError(f"config.json: {num_heads} query heads cannot share {kv_heads} key heads evenly")
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=raw.get("head_dim") or hidden_size // num_heads,
            vocab_size=_count(raw, "vocab_size"),
            max_positions=_count(raw, "max_position_embeddings"),
            norm_eps=_required(raw, "rms_norm_eps"),
            rope=Rope.from_hf(raw),
            tie_embeddings=bool(tied),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
        )


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise LayerwaveError(f"config.json: the key {key} is missing; add it as the model was trained")
    return raw[key]


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = _required(raw, key)
    if not isinstance(value, int) or value < 1:
        raise LayerwaveError(f"config.json: {key} is {value!r}, expected a whole number of at least 1")
    return value


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    # Keys with an underscore in front (_name_or_path, _attn_implementation, …) are bookkeeping by convention.
    unknown = sorted(key for key in set(raw) - _READ - _NEUTRAL - set(_NEUTRAL_IF) if not key.startswith("_"))
    if unknown:
        raise LayerwaveError(
            f"config.json: unknown keys {', '.join(unknown)}; they may change the forward pass, so they are not "
            "ignored: remove those that do not, in a copy of the checkpoint"
        )
    for key, harmless in _NEUTRAL_IF.items():
        if raw.get(key, harmless) != harmless:
            raise LayerwaveError(f"config.json: {key} {raw[key]!r} is not supported; supported: {harmless!r}")


def _refuse_unimplemented(raw: Mapping[str, Any], num_layers: int) -> None:
    if raw.get("hidden_act") != "silu":
        raise LayerwaveError(f"config.json: hidden_act {raw.get('hidden_act')!r} is not supported; supported: 'silu'")
    # Qwen2 and Qwen3 name a window in every config and use it only when told to; other files name one to use it.
    told = False if raw["model_type"].startswith("qwen") else raw.get("sliding_window") is not None
    if raw.get("use_sliding_window", told):
        raise LayerwaveError("config.json: sliding-window attention is not supported for this model type")
    kinds = raw.get("layer_types")
    if kinds and set(kinds) != {"full_attention"}:
        raise LayerwaveError(f"config.json: layer_types {sorted(set(kinds))} given; only full_attention is supported")
    if kinds and len(kinds) != num_layers:
        raise LayerwaveError(
            f"config.json: {len(kinds)} layer_types for {num_layers} layers; correct the one that is wrong"
        )
