"""A draft as a directory: `config.json` and `model.safetensors` with the tensor names of SpecForge.

The vocabulary is in the tensors (`d2t`, `t2d`) and its fingerprint in the config, so that tables of another draft do
not pass. The embedding is not in the file: it is the target's.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from layerwave.drafts.config import DraftConfig
from layerwave.drafts.eagle3 import Draft, Eagle3
from layerwave.drafts.vocabulary import DraftVocabulary
from layerwave.errors import LayerwaveError
from layerwave.files.reading import inside, read_object, shown, typed
from layerwave.files.writing import whole_directory
from layerwave.targets.checkpoint import (
    Parameter,
    TensorFiles,
    load_parameters,
    parameters,
    require_tensors,
    tensors_of,
)

SCHEMA, VERSION = "layerwave.draft", 1
_CONFIG, _TENSORS = "config.json", "model.safetensors"
_A_DRAFT = "name a directory that holds a draft"


@dataclass(frozen=True)
class _TargetName:
    name: str
    fingerprint: str


@dataclass(frozen=True)
class _Description:
    """`config.json` without its schema and version."""

    layerwave_version: str
    target: _TargetName
    vocabulary_fingerprint: str
    config: dict[str, Any]


def draft_parameters(module: Eagle3) -> list[Parameter]:
    """Parameters and their tensors' names in SpecForge's format, which has no stacked ones."""
    return parameters(module, lambda modules: [".".join(modules)])


def draft_tensors(draft: Draft, dtype: DTypeLike = jnp.float32) -> dict[str, np.ndarray]:
    """Tensors of a draft by their names in SpecForge's format: parameters cast to `dtype`, `d2t` int64, `t2d` bool."""
    tables = {"d2t": draft.vocabulary.d2t, "t2d": draft.vocabulary.t2d}
    return tensors_of(draft.module, draft_parameters(draft.module), dtype) | tables


def draft_from_tensors(
    config: DraftConfig,
    tensors: Mapping[str, np.ndarray],
    target_fingerprint: str,
    target_name: str,
    dtype: DTypeLike = jnp.float32,
) -> Draft:
    """The draft that `draft_tensors` took apart.

    Raises:
      LayerwaveError: one message that lists every missing, unused and misshapen tensor; NaN; tables that do not agree.
    """
    _require_shapes(config, {name: tensor.shape for name, tensor in tensors.items()})
    module = nnx.eval_shape(lambda: Eagle3(config, dtype=dtype, rngs=nnx.Rngs(0)))
    load_parameters(module, draft_parameters(module), tensors.__getitem__, dtype)
    vocabulary = DraftVocabulary.from_d2t(tensors["d2t"], tensors["t2d"].astype(bool), config.vocab_size)
    return Draft(config, module, vocabulary, target_fingerprint, target_name)


def _require_shapes(config: DraftConfig, given: Mapping[str, tuple[int, ...]]) -> None:
    """Raises one `LayerwaveError` for tensors that the config does not describe; no size it claims is allocated."""
    module = nnx.eval_shape(lambda: Eagle3(config, rngs=nnx.Rngs(0)))
    shapes = {name: p.shape for p in draft_parameters(module) for name in p.tensors}
    require_tensors(shapes | {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}, given)


def save_draft(draft: Draft, directory: str | os.PathLike[str], dtype: DTypeLike = jnp.float32) -> None:
    """Writes the directory, whole or not at all; a draft that was there is replaced.

    Raises:
      LayerwaveError: the directory holds something else, or cannot be written.
    """
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "layerwave_version": version("layerwave"),
        "target": {"name": draft.target_name, "fingerprint": draft.target_fingerprint},
        "vocabulary_fingerprint": draft.vocabulary.fingerprint,
        "config": draft.config.to_json(),
    }
    with whole_directory(directory) as partial:
        save_file(draft_tensors(draft, dtype), partial / _TENSORS, metadata={"format": "pt"})
        (partial / _CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_draft(directory: str | os.PathLike[str], dtype: DTypeLike = jnp.float32) -> Draft:
    """Reads what `save_draft` wrote; parameters, and so all computation, in `dtype`.

    Raises:
      LayerwaveError: no draft there, another version, tensors that do not fit the config, or a vocabulary that is not
        the one the draft was trained with.
    """
    directory = Path(directory)
    path = inside(directory, _CONFIG, _A_DRAFT)
    content = read_object(path, _A_DRAFT)
    schema, given = content.pop("schema", None), content.pop("version", None)
    if (schema, given) != (SCHEMA, VERSION):
        raise LayerwaveError(
            f"{path}: schema {shown(schema)} and version {shown(given)}, expected {SCHEMA!r} and {VERSION}: name a "
            "draft that layerwave saved, or import one of another tool first"
        )
    try:
        said = typed(_Description, content, "config.json")
    except LayerwaveError as error:
        raise LayerwaveError(f"{path} is damaged ({error}): save the draft again") from None
    config = DraftConfig.from_json(said.config)
    files = TensorFiles.open(directory)
    _require_shapes(config, files.shapes)
    tensors = {name: files.read(name) for name in files.files}
    draft = draft_from_tensors(config, tensors, said.target.fingerprint, said.target.name, dtype)
    if draft.vocabulary.fingerprint != said.vocabulary_fingerprint:
        raise LayerwaveError(
            f"{directory}: the draft was trained with the vocabulary {said.vocabulary_fingerprint[:12]}, but its d2t "
            "and t2d hold "
            f"{draft.vocabulary.fingerprint[:12]}: its head would name the wrong tokens; restore both from one save"
        )
    return draft
