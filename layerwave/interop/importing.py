"""Drafts that other tools trained or that `export_draft` wrote, and our own.

What a file leaves open is asked for, not guessed: which layers, in which numbering. A key whose absence means different
things to different readers must be there. A key that is not known is an error, as for targets.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from layerwave.drafts import Draft, DraftConfig, DraftVocabulary, draft_from_tensors, load_draft, require_target
from layerwave.drafts.checkpoint import SCHEMA
from layerwave.errors import LayerwaveError
from layerwave.files.reading import inside, read_object, shown, typed
from layerwave.interop.export import FLAGS, OWN_KEY
from layerwave.interop.layer_ids import Convention, layers_from_ids
from layerwave.selection.sets import check_layers
from layerwave.targets import DecoderConfig, Target
from layerwave.targets.checkpoint import TensorFiles

# Spellings of the ids, at the top level and in eagle_config: the second of vLLM, the third of AngelSlim.
_IDS = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "aux_hidden_states_layer_ids")
# What ModelOpt and SGLang may say, as long as they say this.
_EXPECTED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "has_lm_head": True,
    "bias": False,
    "qkv_bias": False,
}
_EAGLE_CONFIG = frozenset({*_IDS, *FLAGS, *_EXPECTED, "parallel_draft_heads_num_layers"})
_TOP = frozenset(
    {*_IDS, *FLAGS, *_EXPECTED, OWN_KEY}
    | set("draft_vocab_size target_hidden_size num_aux_hidden_states eagle_config target_model_type".split())
)
_SPECULATORS = frozenset(
    "speculators_model_type speculators_version speculators_config transformer_layer_config embed_requires_grad".split()
)
# Of the top level of speculators' config, where the layer's own keys are nested.
_BOOKKEEPING = frozenset("architectures auto_map dtype torch_dtype transformers_version tie_word_embeddings".split())
_A_DRAFT = "name a directory that holds a draft"
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class _OwnTarget:
    name: str
    fingerprint: str


@dataclass(frozen=True)
class _Own:
    """What `export_draft` said about the draft."""

    ids_read_as: Convention
    layers: tuple[int, ...]
    target: _OwnTarget
    vocabulary_fingerprint: str
    version: str = ""
    consumer: str = ""
    num_target_layers: int = 0


@dataclass(frozen=True)
class _Description:
    """A config.json of any format, in one form."""

    layer: Mapping[str, Any]
    """The draft's one layer as a Hugging Face config."""
    raw: Mapping[str, Any]
    flags: Mapping[str, bool]
    ids: list | None
    convention: Convention | None
    """What the ids count, where the format says it."""
    own: _Own | None


def import_draft(
    directory: str | os.PathLike[str],
    target: Target,
    *,
    layers: Iterable[SupportsIndex] | None = None,
    convention: Convention | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Draft:
    """Reads a draft: of layerwave, of SpecForge, SGLang, SafeAILab, ModelOpt or Automodel, of speculators.

    `norm_output` is read as engines read it, the final-normed output fed back; SpecForge trained otherwise until #879.

    Args:
        target: the target it was trained for; the file's embedding must be the target's.
        layers: outputs of the target's layers, 0-based, for files that name none (SafeAILab's drafts read
            `baseline("eagle3_engine", N)`).
        convention: what the file's ids count, for files that leave it open.
        dtype: of the parameters.

    Raises:
        LayerwaveError: no draft there; ids absent, ambiguous or contradictory; a missing key, an unknown one, or one
            whose meaning is not implemented (biases, further layers, sliding windows, other norms); a reduced
            vocabulary without d2t; an embedding of its own; another target.
    """
    directory = Path(directory)
    raw = read_object(inside(directory, "config.json", _A_DRAFT), _A_DRAFT)
    if raw.get("schema") == SCHEMA:
        if layers is not None or convention is not None:
            raise LayerwaveError(f"{directory} is a draft of layerwave and names its layers: leave out what names them")
        draft = load_draft(directory, dtype)
        require_target(draft, target)
        return draft
    try:
        return _import_foreign(TensorFiles.open(directory), _describe(raw), target, layers, convention, dtype)
    except LayerwaveError as error:
        raise LayerwaveError(f"{directory}: {error}") from None


def _import_foreign(files, description, target, layers, convention, dtype) -> Draft:
    own = description.own
    if own and own.target.fingerprint != target.fingerprint:
        raise LayerwaveError(
            f"the draft was exported for the target {shown(own.target.name)} (fingerprint "
            f"{own.target.fingerprint[:12]}), got {target.name!r} ({target.fingerprint[:12]}): load that target"
        )
    tensors = _named_as_ours({name: files.read(name) for name in files.files if not name.endswith(_DERIVED_SUFFIXES)})
    layer = DecoderConfig.from_hf(description.layer, has_head=True)
    config = _draft_config(description, layer, target, _layers(description, target, layers, convention))
    _check_embedding(tensors.pop("embed_tokens.weight", None), target)
    tensors |= _tables(tensors, config)
    draft = draft_from_tensors(config, tensors, target.fingerprint, target.name, dtype)
    if own and own.vocabulary_fingerprint != draft.vocabulary.fingerprint:
        raise LayerwaveError("d2t and t2d are not those that the draft was exported with: export it again")
    return draft


def _describe(raw: Mapping[str, Any]) -> _Description:
    nested = typed(dict[str, Any] | None, raw.get("eagle_config"), "config.json: eagle_config") or {}
    _refuse_unknown("eagle_config", nested, _EAGLE_CONFIG)
    own = raw.get(OWN_KEY)
    if own is not None:
        own = typed(_Own, own, f"config.json, which should be exported again: {OWN_KEY}")
    for key, expected in _EXPECTED.items():
        if _agreed(raw, nested, (key,), default=expected) != expected:
            raise LayerwaveError(f"{key} is not {json.dumps(expected)}: such a draft is not supported")
    flags = {name: typed(bool, _agreed(raw, nested, (name,), default=False), f"config.json: {name}") for name in FLAGS}
    ids = typed(list | None, _agreed(raw, nested, _IDS, default=None), "config.json: the layer ids")
    if "speculators_model_type" not in raw:
        layer = {key: value for key, value in raw.items() if key not in _TOP}
        return _Description(layer, raw, flags, ids, None, own)
    layer = raw.get("transformer_layer_config")
    if raw["speculators_model_type"] != "eagle3" or not isinstance(layer, Mapping):
        raise LayerwaveError(f"a speculators model of type {shown(raw['speculators_model_type'])}; only eagle3 is read")
    _refuse_unknown("config.json", raw, _TOP | _SPECULATORS | _BOOKKEEPING)
    if raw.get("norm_before_residual") is None:
        raise LayerwaveError(
            "config.json: norm_before_residual is missing, and its default was true in old versions of speculators and "
            "vLLM, false in new ones; add it as the draft was trained"
        )
    return _Description(layer, raw, flags, ids, "boundary", own)


def _refuse_unknown(where: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    # Keys with an underscore in front are bookkeeping by convention, as in a target's config.json.
    unknown = sorted(key for key in set(given) - known if not key.startswith("_"))
    if unknown:
        raise LayerwaveError(
            f"{where}: unknown keys {', '.join(unknown)}; they may change the forward pass, so they are not ignored: "
            "remove those that do not, in a copy of the draft"
        )


def _agreed(raw: Mapping[str, Any], nested: Mapping[str, Any], keys: tuple[str, ...], *, default: Any) -> Any:
    """The value under any of these keys, at the top level or in eagle_config; a null counts as absent."""
    places = {key: raw.get(key) for key in keys} | {f"eagle_config.{key}": nested.get(key) for key in keys}
    found = {place: value for place, value in places.items() if value is not None}
    first = next(iter(found.values()), default)
    if any(value != first for value in found.values()):
        said = ", ".join(f"{place} is {shown(value)}" for place, value in found.items())
        raise LayerwaveError(f"config.json contradicts itself: {said}; readers differ in which they take, so keep one")
    return first


def _layers(
    description: _Description, target: Target, layers: Iterable[SupportsIndex] | None, convention: Convention | None
) -> tuple[int, ...]:
    """The layers that the draft reads, from its ids or from the caller; never from a default."""
    ids, own, num_layers = description.ids, description.own, target.config.num_layers
    if ids is None:
        if layers is None or convention is not None:
            raise LayerwaveError(
                "config.json has no layer ids (eagle_aux_hidden_state_layer_ids, at the top level or in eagle_config), "
                "and readers then take layers of their own: pass layers=, the 0-based outputs it was trained on"
            )
        return check_layers(layers, num_layers)
    if layers is not None:
        raise LayerwaveError(f"config.json names its layers by the ids {shown(ids)}: leave layers out")
    documented = own.ids_read_as if own else description.convention
    if documented is None and convention is None:
        raise LayerwaveError(
            f"the layer ids {shown(ids)} may count outputs of layers (SpecForge, SGLang, ModelOpt) or boundaries "
            "(vLLM, llama.cpp), and the file does not say which: pass convention='output' or 'boundary'"
        )
    if convention not in (None, documented or convention):
        raise LayerwaveError(f"the layer ids {shown(ids)} of this file are read as {documented}: leave convention out")
    found = layers_from_ids(ids, num_layers, documented or convention)
    if own and found != own.layers:
        raise LayerwaveError(
            f"the layer ids {ids} name layers {list(found)}, but the draft was exported with layers "
            f"{list(own.layers)}: config.json was changed; export the draft again"
        )
    return found


def _draft_config(
    description: _Description, layer: DecoderConfig, target: Target, layers: tuple[int, ...]
) -> DraftConfig:
    raw, given = description.raw, target.config
    count, width = raw.get("num_aux_hidden_states"), raw.get("target_hidden_size")
    width = given.hidden_size if width is None else width
    faults = [
        (layer.num_layers != 1, f"num_hidden_layers is {layer.num_layers}; drafts of one layer are supported"),
        (layer.qkv_bias or layer.o_bias or layer.mlp_bias, "biases in attention or MLP are not supported"),
        (layer.qk_norm, f"a {layer.model_type} layer norms queries and keys, which is not supported"),
        (not _is_llama(layer), f"a {layer.model_type} layer is not a Llama layer with another name"),
        (layer.tie_embeddings, "tie_word_embeddings is true, but the head is over the draft's own vocabulary"),
        (layer.vocab_size != given.vocab_size, f"vocab_size is {layer.vocab_size}, the target's {given.vocab_size}"),
        (layer.hidden_size != given.hidden_size, f"hidden_size {layer.hidden_size}, the target's {given.hidden_size}"),
        (
            width != given.hidden_size,
            f"target_hidden_size is {shown(width)}, the target's hidden_size {given.hidden_size}",
        ),
        (
            count not in (None, len(layers)),
            f"num_aux_hidden_states is {shown(count)}, but {len(layers)} layers are named",
        ),
    ]
    found = [fault for present, fault in faults if present]
    if found:
        raise LayerwaveError(f"this draft is not supported here or does not fit the target: {'; '.join(found)}")
    return DraftConfig(
        layers=layers,
        num_target_layers=given.num_layers,
        target_hidden_size=given.hidden_size,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        vocab_size=layer.vocab_size,
        draft_vocab_size=layer.vocab_size if raw.get("draft_vocab_size") is None else raw["draft_vocab_size"],
        max_positions=layer.max_positions,
        norm_eps=layer.norm_eps,
        rope=layer.rope,
        **description.flags,
    )


def _is_llama(layer: DecoderConfig) -> bool:
    return all(getattr(layer, f.name) == f.default for f in fields(DecoderConfig) if f.default is not MISSING)


def _named_as_ours(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """SpecForge's names, from those of speculators and vLLM (`layers.0.`) and of Automodel (`model.`)."""
    renamed = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix("model.")
        ours = ours.replace("layers.0.", "midlayer.", 1) if ours.startswith("layers.0.") else ours
        if ours in renamed:
            raise LayerwaveError(f"two tensors are {ours}, one of them named {name}: keep the one that was trained")
        renamed[ours] = tensor
    return renamed


def _check_embedding(embedding: np.ndarray | None, target: Target) -> None:
    if embedding is None:
        return
    table = np.asarray(target.decoder.embed_tokens.embedding[...])
    # Either may have been rounded to bfloat16.
    same = embedding.shape == table.shape and any(
        np.array_equal(embedding.astype(dtype), table.astype(dtype)) for dtype in (np.float32, jnp.bfloat16)
    )
    if not same:
        raise LayerwaveError(
            f"embed_tokens.weight is not the embedding of the target {target.name!r}: the draft was trained for "
            "another target, or with an embedding of its own, which is not supported"
        )


def _tables(tensors: Mapping[str, np.ndarray], config: DraftConfig) -> dict[str, np.ndarray]:
    """d2t and t2d, completed where a format may leave them out."""
    identity = config.draft_vocab_size == config.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None and not identity:
        raise LayerwaveError(
            f"d2t is missing, but the draft has {config.draft_vocab_size} of the target's {config.vocab_size} tokens: "
            "readers would take the first ones; add d2t and t2d of the training run to model.safetensors"
        )
    d2t = np.zeros(config.draft_vocab_size, np.int64) if d2t is None else d2t
    t2d = DraftVocabulary.from_d2t(d2t, None, config.vocab_size).t2d if t2d is None else t2d
    return {"d2t": d2t, "t2d": t2d}
