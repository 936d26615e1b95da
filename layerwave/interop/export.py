"""Drafts in the formats that engines load: SpecForge's, which SGLang loads, and that of speculators, which vLLM loads.

One JSON key, `eagle_aux_hidden_state_layer_ids`, means outputs of layers to some engines and boundaries to others; some
read it at the top level of config.json, others in `eagle_config`. So it is written for one consumer, in both places,
and the key `layerwave` says what was meant.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from layerwave.drafts import Draft, DraftConfig, draft_tensors, require_target
from layerwave.errors import LayerwaveError
from layerwave.files.writing import whole_directory
from layerwave.interop.layer_ids import CONSUMERS, Convention, layer_ids
from layerwave.targets import DTypeName, Target
from layerwave.targets.families import FAMILIES
from layerwave.targets.rope import Rope

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options of `DraftConfig` that are keys of the same name in every format."""
OWN_KEY = "layerwave"
# Whose config.json the speculators format here is.
_SPECULATORS_VERSION = "0.9.0"
# The default of speculators; vLLM takes it where num_speculative_tokens is not given.
_SPECULATIVE_TOKENS = 3


@dataclass(frozen=True)
class Engine:
    """What a consumer loads, besides the layer ids."""

    format: Literal["specforge", "speculators"]
    embedding: bool = True
    """The file brings the target's embedding; otherwise the engine takes it from the target."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Options of a draft that it does not compute, and why."""
    since: Mapping[str, str] = field(default_factory=dict)
    """Options that it computes since a pull request."""
    skips_fc: bool = False
    """It takes states as wide as the draft for the draft's own output, and leaves fc out."""


_UNNORMED = "it adds the attention to the features as they came"
_SGLANG = Engine(
    "specforge",
    embedding=False,
    refuses={"norm_before_residual": _UNNORMED},
    since={"fc_norm": "sglang#24663", "norm_output": "sglang#24663", "norm_before_fc": "sglang#32334"},
    skips_fc=True,
)
ENGINES = {
    "specforge": Engine(
        "specforge",
        refuses={"norm_before_residual": _UNNORMED, "norm_before_fc": "it knows no norm over the joined states"},
        since={"fc_norm": "SpecForge#568", "norm_output": "SpecForge#879"},
    ),
    "sglang": _SGLANG,
    "sglang-deepseek": _SGLANG,
    "sglang-gpt-oss": _SGLANG,
    "speculators": Engine(
        "speculators",
        since={"norm_before_fc": "speculators#337", "fc_norm": "speculators#670", "norm_output": "speculators#610"},
    ),
    "vllm": Engine(
        "speculators",
        since={"norm_before_fc": "vllm#38111", "fc_norm": "vllm#43482", "norm_output": "vllm#46488"},
        skips_fc=True,
    ),
}


@dataclass(frozen=True)
class Exported:
    """What was written, and for whom."""

    directory: Path
    consumer: str
    format: Literal["specforge", "speculators"]
    dtype: DTypeName
    layers: tuple[int, ...]
    num_target_layers: int
    reads: Convention
    ids: tuple[int, ...]
    since: tuple[str, ...]
    """Which version of the consumer the draft needs at least, one entry an option."""

    @property
    def ids_line(self) -> str:
        names = "outputs of layers" if self.reads == "output" else "boundaries, inputs of layers"
        layers, ids = (",".join(map(str, numbers)) for numbers in (self.layers, self.ids))
        return f"ids {ids} ({names}) make {self.consumer} read layers {layers} of {self.num_target_layers}"


def export_draft(
    draft: Draft, target: Target, consumer: str, directory: str | os.PathLike[str], *, dtype: DTypeName = "bfloat16"
) -> Exported:
    """Writes a Hugging Face style directory, whole or not at all.

    Args:
        target: the draft's; its embedding goes into formats that hold one.
        consumer: a key of `ENGINES`.
        dtype: of the tensors.

    Raises:
        LayerwaveError: another target than the draft's; layers or options that the consumer does not read, naming since
            which version it does where one is known; a directory that is not empty or cannot be written.
    """
    require_target(draft, target)
    if consumer not in ENGINES:
        raise LayerwaveError(f"no export for {consumer!r}: choose from {', '.join(ENGINES)}")
    engine, config, directory = ENGINES[consumer], draft.config, Path(directory)
    ids = layer_ids(config.layers, config.num_target_layers, consumer)
    _refuse(engine, config, consumer)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise LayerwaveError(f"{directory} is there and not an empty directory: name a new one")
    exported = Exported(
        directory=directory,
        consumer=consumer,
        format=engine.format,
        dtype=dtype,
        layers=config.layers,
        num_target_layers=config.num_target_layers,
        reads=CONSUMERS[consumer].reads,
        ids=ids,
        since=tuple(f"{flag}: {since}" for flag, since in engine.since.items() if getattr(config, flag)),
    )
    tensors = draft_tensors(draft, jnp.dtype(dtype))
    if engine.embedding:
        tensors["embed_tokens.weight"] = np.asarray(target.decoder.embed_tokens.embedding[...]).astype(jnp.dtype(dtype))
    make = _specforge if engine.format == "specforge" else _speculators
    content, tensors = make(draft, target, exported, tensors)
    with whole_directory(directory) as partial:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return exported


def _refuse(engine: Engine, config: DraftConfig, consumer: str) -> None:
    title = CONSUMERS[consumer].title
    for flag, reason in engine.refuses.items():
        if getattr(config, flag):
            raise LayerwaveError(f"{title} cannot run a draft with {flag}: {reason}; export it for speculators or vllm")
    if engine.skips_fc and len(config.layers) * config.target_hidden_size == config.hidden_size:
        raise LayerwaveError(
            f"{title} skips fc when the states read are as wide as the draft, here {config.hidden_size}: train the "
            "draft on another number of layers, or export it for speculators"
        )


def _specforge(draft: Draft, target: Target, exported: Exported, tensors: dict[str, np.ndarray]):
    config = draft.config
    # A flag that is off is left out, but for the first: norm_output false meant no norm before the head to SpecForge
    # until #879, while a missing key is plain EAGLE-3 to every version of every reader.
    flags = {name: getattr(config, name) for name in FLAGS if name == FLAGS[0] or getattr(config, name)}
    nested = {"eagle_aux_hidden_state_layer_ids": exported.ids, "use_aux_hidden_state": True, **flags}
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(config),
        "torch_dtype": exported.dtype,
        "pad_token_id": target.tokenizer.pad_token_id,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": exported.ids,
        **({"num_aux_hidden_states": len(exported.ids)} if len(exported.ids) != 3 else {}),
        **flags,
        "eagle_config": nested,
        OWN_KEY: _own(draft, exported),
    }
    return content, tensors


def _speculators(draft: Draft, target: Target, exported: Exported, tensors: dict[str, np.ndarray]):
    config = draft.config
    method = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}
    is_directory = Path(target.name).is_dir()
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "dtype": exported.dtype,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": exported.ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": exported.ids, "use_aux_hidden_state": True},
        **{name: getattr(config, name) for name in FLAGS},
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": os.path.abspath(target.name) if is_directory else target.name,
                "architectures": [FAMILIES[target.config.model_type].architecture],
            },
        },
        OWN_KEY: _own(draft, exported),
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if config.draft_vocab_size == config.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return content, tensors


def _layer(config: DraftConfig) -> dict[str, Any]:
    """The draft's one layer as a Llama config."""
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        **_rope(config.rope),
        "tie_word_embeddings": False,
    }


def _rope(rope: Rope) -> dict[str, Any]:
    """Both spellings: transformers 4 reads `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`."""
    fields = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
    used = {"default": (), "linear": ("factor",), "llama3": tuple(fields)}[rope.kind]
    scaling = {"rope_type": rope.kind, **{name: fields[name] for name in used}}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
    }


def _own(draft: Draft, exported: Exported) -> dict[str, Any]:
    return {
        "version": version("layerwave"),
        "consumer": exported.consumer,
        "ids_read_as": exported.reads,
        "layers": exported.layers,
        "num_target_layers": exported.num_target_layers,
        "target": {"name": draft.target_name, "fingerprint": draft.target_fingerprint},
        "vocabulary_fingerprint": draft.vocabulary.fingerprint,
    }
