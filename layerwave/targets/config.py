"""What a decoder needs to know, read from a Hugging Face `config.json`.

A key may be absent only where the checkpoint's tensors would contradict a wrong guess (`head_dim`,
`num_key_value_heads`, biases, tying), or where published files leave it to the family's implementation (families.py).
What the shapes cannot show (`rope_theta`, `rms_norm_eps`) is required, and a key that this decoder does not know is an
error: most silent faults of ports are a key that was ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from layerwave.errors import LayerwaveError
from layerwave.files.reading import shown
from layerwave.targets.families import FAMILIES, Family, Norms
from layerwave.targets.rope import Rope

# Keys that this file reads for every family; the others are the family's own.
_READ = frozenset(
    """model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters attention_bias
    mlp_bias use_sliding_window sliding_window max_window_layers layer_types tie_word_embeddings""".split()
)
# Keys that change nothing in a forward pass in evaluation: bookkeeping, training, and generation settings of old files.
_NEUTRAL = frozenset(
    """architectures dtype torch_dtype transformers_version use_cache initializer_range bos_token_id eos_token_id
    pad_token_id attention_dropout pretraining_tp auto_map transformers.js_config cache_implementation
    neftune_noise_alpha unsloth_version unsloth_fixed output_attentions embd_pdrop resid_pdrop
    output_router_logits router_aux_loss_coef router_jitter_noise
    output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type
    max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size num_return_sequences""".split()
)
# Keys that change nothing as long as they are null or say this.
_NEUTRAL_IF = {
    "use_mrope": False,
    "rope_interleaved": False,
    "is_llama_config": True,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,  # entropies and drafts read the head as it is
    "use_bidirectional_attention": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "decoder_sparse_step": 1,  # a scan needs layers of one kind: experts in all or in none
    "mlp_only_layers": [],
}
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000
"""Of any size, which has to be an int32 on a device; of layers, over which lists are made."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    size: intermediate size of an expert. normalized: the chosen experts' probabilities are scaled to sum to 1.
    """

    count: int
    per_token: int
    size: int
    normalized: bool


@dataclass(frozen=True)
class DecoderConfig:
    """Static description of a decoder; everything the forward pass depends on besides the parameters.

    The defaults of the later fields are those of a Llama.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of a dense MLP."""
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
    qk_norm_width: bool = False
    """Norm all heads of the queries, and all of the keys, as one vector; False: each head by itself."""
    norms: Norms = "pre"
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its square root; None: by that of head_dim."""
    sliding_window: int | None = None
    """Tokens that a query of a sliding layer sees, itself among them."""
    sliding_layers: tuple[bool, ...] = ()
    """Of each layer, whether it slides; empty: none does."""
    local_rope: Rope | None = None
    """Of the sliding layers, where it is not `rope`."""
    experts: Experts | None = None

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
        raw = _text_config(raw, family)
        _refuse_unknown(raw, family)
        num_heads, hidden_size = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
        num_layers = _count(raw, "num_hidden_layers", _MOST_LAYERS)
        attention_bias = _flag(raw, "attention_bias")
        if raw.get("tie_word_embeddings") is None and has_head is None:
            raise LayerwaveError("config.json: tie_word_embeddings is missing; add true or false")
        tied = _flag(raw, "tie_word_embeddings", default=not has_head)
        kv_heads = _count(raw, "num_key_value_heads") if raw.get("num_key_value_heads") is not None else num_heads
        if num_heads % kv_heads:
            raise LayerwaveError(f"config.json: {num_heads} query heads cannot share {kv_heads} key heads evenly")
        head_dim = _count(raw, "head_dim") if raw.get("head_dim") is not None else hidden_size // num_heads
        if head_dim < 2 or head_dim % 2:
            raise LayerwaveError(
                f"config.json: heads of {head_dim} channels (head_dim, or hidden_size / num_attention_heads), expected "
                "an even number, since pairs of channels turn; correct the one that is wrong"
            )
        sliding_layers = _sliding_layers(raw, family, num_layers)
        scalar = raw.get("query_pre_attn_scalar")
        rope, local_rope = _ropes(raw, family, head_dim)
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_count(raw, "vocab_size"),
            max_positions=_count(raw, "max_position_embeddings"),
            norm_eps=_positive(raw, "rms_norm_eps"),
            rope=rope,
            tie_embeddings=tied,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.qkv_bias is None else False,
            mlp_bias=_flag(raw, "mlp_bias"),
            qk_norm=family.qk_norm is not None,
            qk_norm_width=family.qk_norm == "width",
            norms=family.norms,
            norm_offset=family.norm_offset,
            activation=_activation(raw),
            embed_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
            query_pre_attn_scalar=None if scalar is None else _positive(raw, "query_pre_attn_scalar"),
            sliding_window=_count(raw, "sliding_window") if any(sliding_layers) else None,
            sliding_layers=sliding_layers,
            local_rope=local_rope if any(sliding_layers) else None,
            experts=_experts(raw, family),
        )

    def context(self, lengths: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
        """Tokens that sequences which begin with so many can grow to.

        That is `max_positions`, or one more than the last length for which the keys in a cache are turned right:
        LongRoPE turns all tokens of a sequence otherwise once it is longer than the original context.
        """
        room = np.full_like(lengths, self.max_positions)
        for rope in (self.rope, self.local_rope):
            if rope is not None and rope.kind == "longrope":
                original = rope.original_max_positions
                room = np.where(lengths <= original, np.minimum(room, original + 1), room)
        return room


def _required(raw: Mapping[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise LayerwaveError(f"config.json: the key {key} is missing; add it as the model was trained")
    return raw[key]


def _count(raw: Mapping[str, Any], key: str, most: int = _MOST) -> int:
    value = _required(raw, key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise LayerwaveError(f"config.json: {key} is {shown(value)}, expected a whole number from 1 to {most}")
    return value


def _flag(raw: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise LayerwaveError(f"config.json: {key} is {shown(value)}, expected true or false")
    return value


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = _required(raw, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
        raise LayerwaveError(f"config.json: {key} is {shown(value)}, expected a number greater than 0")
    return float(value)


def _text_config(raw: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The keys that describe the decoder, with the family's defaults."""
    if family.nested is not None:
        text, beside = raw.get("text_config"), dict(raw)
        if not isinstance(text, Mapping):
            raise LayerwaveError(
                f"config.json: text_config is {shown(text)}, but a {raw['model_type']} model is described there; "
                "copy the model's own config.json"
            )
        for key in ("text_config", *family.nested):
            beside.pop(key, None)
        raw = {**beside, **text}
    return {**family.defaults, **raw}


def _refuse_unknown(raw: Mapping[str, Any], family: Family) -> None:
    # Keys with an underscore in front (_name_or_path, _attn_implementation, …) are bookkeeping by convention.
    known = _READ | family.keys | _NEUTRAL | set(_NEUTRAL_IF)
    unknown = sorted(key for key in set(raw) - known if not key.startswith("_"))
    if unknown:
        said = ", ".join(f"{key} ({shown(raw[key])})" for key in unknown)
        raise LayerwaveError(
            f"config.json: unknown keys {said}; they may change the forward pass, so they are not ignored: remove "
            "those that do not, in a copy of the checkpoint"
        )
    for key, harmless in _NEUTRAL_IF.items():
        if raw.get(key) not in (None, harmless):
            raise LayerwaveError(f"config.json: {key} {shown(raw[key])} is not supported; supported: {harmless!r}")


def _activation(raw: Mapping[str, Any]) -> Literal["silu", "gelu_tanh"]:
    key = "hidden_activation" if raw.get("hidden_activation") else "hidden_act"
    names = [raw[key] for key in ("hidden_act", "hidden_activation") if raw.get(key)] or [None]
    if any(name != names[0] or name not in [*_ACTIVATIONS] for name in names):
        said = " and ".join(sorted(map(shown, names)))
        raise LayerwaveError(f"config.json: {key} {said} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[names[0]]


def _sliding_layers(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    """Of each layer, whether its attention has a window."""
    window, kinds = raw.get("sliding_window"), raw.get("layer_types")
    told = _flag(raw, "use_sliding_window")
    if family.window is None and (window is not None or told):
        raise LayerwaveError(
            f"config.json: sliding_window is {shown(window)}, but sliding-window attention is not supported for "
            f"model_type {raw['model_type']}; supported: null"
        )
    if family.window == "set" and "sliding_window" not in raw:
        raise LayerwaveError("config.json: the key sliding_window is missing; add it, null if there is none")
    if family.window == "told" and not told:
        window = None
    match family.slides:
        case "all":
            slides = [True] * num_layers
        case "upper":
            first = 0
            if window is not None and kinds is None and _required(raw, "max_window_layers") != 0:
                first = _count(raw, "max_window_layers")
            slides = [layer >= first for layer in range(num_layers)]
        case "periodic":
            period = _count(raw, "sliding_window_pattern")
            slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if kinds is not None:
        if not isinstance(kinds, list):
            raise LayerwaveError(f"config.json: layer_types is {shown(kinds)}, expected a list, one for each layer")
        unknown = sorted({str(kind) for kind in kinds if kind not in (_FULL, _SLIDING)})
        if unknown:
            raise LayerwaveError(
                f"config.json: layer_types {shown(unknown)} are not supported; supported: {_FULL}, {_SLIDING}"
            )
        if len(kinds) != num_layers:
            raise LayerwaveError(
                f"config.json: {len(kinds)} layer_types for {num_layers} layers; correct the one that is wrong"
            )
        named = [kind == _SLIDING for kind in kinds]
        if (window is None and any(named)) or (family.slides == "all" and window is not None and not all(named)):
            raise LayerwaveError(
                f"config.json: {sum(named)} of {num_layers} layer_types are {_SLIDING}, but a {raw['model_type']} with "
                f"sliding_window {window!r} slides in {'no layer' if window is None else 'all'}; keep what is right"
            )
        slides = named
    return tuple(slides) if window is not None and any(slides) else ()


def _ropes(raw: Mapping[str, Any], family: Family, head_dim: int) -> tuple[Rope, Rope | None]:
    """The rotation, and that of the sliding layers where the family has one of their own."""
    described = raw.get("rope_parameters")
    if family.local_rope is None:
        found = [Rope.from_hf(raw, family.rope_names), None]
    else:
        # Older files give the bases flat, and then a scaling is meant for the full layers only.
        nested = isinstance(described, Mapping)
        if nested and not set(described) <= {_FULL, _SLIDING}:
            raise LayerwaveError(
                f"config.json: rope_parameters has {shown(sorted(described))}, expected {_FULL} and {_SLIDING}; copy "
                "the model's own"
            )
        parts = [described.get(kind) if nested else None for kind in (_FULL, _SLIDING)]
        bases = [raw.get("rope_theta"), raw.get("rope_local_base_freq")]
        if not nested:
            bases = [d if base is None else base for base, d in zip(bases, family.local_rope, strict=True)]
        scalings = (raw.get("rope_scaling"), None)
        found = [
            Rope.from_hf({**raw, "rope_theta": base, "rope_scaling": scaling, "rope_parameters": part})
            for base, scaling, part in zip(bases, scalings, parts, strict=True)
        ]
    for rope in filter(None, found):
        if rope.partial != 1.0 and not family.partial_rotary:
            raise LayerwaveError(
                f"config.json: partial_rotary_factor {rope.partial} is not supported for model_type "
                f"{raw['model_type']}; supported: 1.0"
            )
        channels = int(head_dim * rope.partial)
        pairs = channels // 2
        if channels % 2 or pairs < (2 if rope.kind == "dynamic" else 1):
            raise LayerwaveError(
                f"config.json: {channels} of {head_dim} channels of a head turn, expected pairs of them; correct "
                "head_dim or partial_rotary_factor"
            )
        factors = {"short_factor": len(rope.short_factor), "long_factor": len(rope.long_factor)}
        if rope.kind == "longrope" and set(factors.values()) != {pairs}:
            raise LayerwaveError(
                f"config.json: longrope has {factors} numbers, expected {pairs}, one for each pair of channels that "
                "turns; copy the model's own"
            )
    return found[0], found[1]


def _experts(raw: Mapping[str, Any], family: Family) -> Experts | None:
    if family.experts is None:
        return None
    counts = {_count(raw, key) for key in ("num_experts", "num_local_experts") if raw.get(key) is not None}
    if len(counts) != 1:
        raise LayerwaveError(
            f"config.json: num_experts and num_local_experts say {sorted(counts)}, expected one number; keep one"
        )
    count, per_token = counts.pop(), _count(raw, "num_experts_per_tok")
    if per_token > count:
        raise LayerwaveError(f"config.json: num_experts_per_tok is {per_token}, but there are only {count} experts")
    if family.experts == "mixtral":
        return Experts(count, per_token, _count(raw, "intermediate_size"), normalized=True)
    _required(raw, "norm_topk_prob")
    return Experts(count, per_token, _count(raw, "moe_intermediate_size"), _flag(raw, "norm_topk_prob"))
