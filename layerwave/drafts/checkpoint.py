"""A draft as a directory: `config.json` and `model.safetensors` with the tensor names of SpecForge.

The vocabulary is in the tensors (`d2t`, `t2d`) and its fingerprint in the config, so that tables of another draft do
not pass. The embedding is not in the file: it is the target's.
"""

import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from layerwave.drafts.config import DraftConfig
from layerwave.drafts.eagle3 import Draft, Eagle3
from layerwave.drafts.vocabulary import DraftVocabulary
from layerwave.errors import LayerwaveError
from layerwave.files import whole_directory
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
    module = nnx.eval_shape(lambda: Eagle3(config, dtype=dtype, rngs=nnx.Rngs(0)))
    wanted = draft_parameters(module)
    shapes = {name: p.shape for p in wanted for name in p.tensors}
    shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    require_tensors(shapes, {name: tensor.shape for name, tensor in tensors.items()})
    load_parameters(module, wanted, tensors.__getitem__, dtype)
    vocabulary = DraftVocabulary.from_d2t(tensors["d2t"], tensors["t2d"].astype(bool), config.vocab_size)
    return Draft(config, module, vocabulary, target_fingerprint, target_name)


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
    path = directory / _CONFIG
    if not path.is_file():
        raise LayerwaveError(f"{path} is missing: name a directory that holds a draft")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema, given = content["schema"], content["version"]
    except (ValueError, KeyError, TypeError):
        schema, given = None, None
    if (schema, given) != (SCHEMA, VERSION):
        raise LayerwaveError(
            f"{path}: schema {schema!r} and version {given!r}, expected {SCHEMA!r} and {VERSION}: name a draft that "
            "layerwave saved, or import one of another tool first"
        )
    try:
        target, fingerprint, config = content["target"], content["vocabulary_fingerprint"], content["config"]
        config, name, target_fingerprint = DraftConfig.from_json(config), target["name"], target["fingerprint"]
    except (KeyError, TypeError) as error:
        raise LayerwaveError(f"{path} is damaged ({error!r}): save the draft again") from error
    files = TensorFiles.open(directory)
    draft = draft_from_tensors(config, {n: files.read(n) for n in files.files}, target_fingerprint, name, dtype)
    if draft.vocabulary.fingerprint != fingerprint:
        raise LayerwaveError(
            f"{directory}: the draft was trained with the vocabulary {fingerprint[:12]}, but its d2t and t2d hold "
            f"{draft.vocabulary.fingerprint[:12]}: its head would name the wrong tokens; restore both from one save"
        )
    return draft
