"""Hugging Face safetensors directories <-> parameters of the decoder.

A parameter's path in the decoder is its tensor's name in the file: `layers.self_attn.q_proj.kernel` stands for the
tensors `model.layers.{l}.self_attn.q_proj.weight` of all `l`, transposed and stacked.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from layerwave.errors import LayerwaveError
from layerwave.targets.config import DecoderConfig
from layerwave.targets.decoder import Decoder

_LEAF_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
# Tables that some checkpoints carry and that are computed here.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class TensorFiles:
    """Where each tensor of a checkpoint lies; nothing is read until it is asked for."""

    files: dict[str, Path]

    @classmethod
    def open(cls, directory: Path) -> "TensorFiles":
        """Indexes `model.safetensors`, or the shards that `model.safetensors.index.json` names.

        Raises:
          LayerwaveError: neither file is there, a shard is missing, a file is truncated, or an index is wrong.
        """
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
            except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
                raise LayerwaveError(f"{index}: not a checkpoint index ({error!r}); download it again") from error
            files = {name: directory / shard for name, shard in weight_map.items()}
            missing = sorted({path.name for path in files.values() if not path.is_file()})
            if missing:
                raise LayerwaveError(f"{directory}: shards named by the index are missing: {', '.join(missing)}")
            held = {path: set(_tensor_names(path)) for path in set(files.values())}
            strayed = sorted(name for name, path in files.items() if name not in held[path])
            if strayed:
                raise LayerwaveError(f"{index}: tensors that their shard does not hold: {', '.join(strayed)}")
            return cls(files)
        if single.is_file():
            return cls(dict.fromkeys(_tensor_names(single), single))
        raise LayerwaveError(
            f"{directory}: neither model.safetensors nor model.safetensors.index.json is there; "
            "only safetensors checkpoints are read"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        with _open(self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        with _open(self.files[name]) as file:
            return file.get_tensor(name)


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise LayerwaveError(f"{path}: not a readable safetensors file ({error}); download it again") from error


def _tensor_names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


@dataclass(frozen=True)
class _Parameter:
    """One parameter of the decoder and the tensors it is made of."""

    path: tuple
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool
    stacked: bool


def _parameters(decoder: Decoder) -> Iterator[_Parameter]:
    num_layers = decoder.config.num_layers
    for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)):
        *modules, leaf = path
        stacked, transposed = modules[0] == "layers", leaf == "kernel"
        shape = variable.shape[1:] if stacked else variable.shape
        if stacked:
            names = [".".join(["model.layers", str(l), *modules[1:], _LEAF_NAMES[leaf]]) for l in range(num_layers)]
        else:
            prefix = [] if modules[0] == "lm_head" else ["model"]
            names = [".".join([*prefix, *modules, _LEAF_NAMES[leaf]])]
        yield _Parameter(path, tuple(names), shape[::-1] if transposed else shape, transposed, stacked)


def load_decoder(config: DecoderConfig, tensors: TensorFiles, dtype: DTypeLike) -> Decoder:
    """A decoder with the parameters of a checkpoint, cast to `dtype`.

    Raises:
      LayerwaveError: one message that lists every missing, unused and misshapen tensor.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    parameters = list(_parameters(decoder))
    _check_tensors(parameters, tensors, config)
    state = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
    loaded = {p.path: jnp.asarray(_assemble(p, tensors, dtype)) for p in parameters}
    nnx.update(decoder, nnx.from_flat_state([(path, variable.replace(loaded[path])) for path, variable in state]))
    return decoder


def _assemble(parameter: _Parameter, tensors: TensorFiles, dtype: DTypeLike) -> np.ndarray:
    pieces = []
    for name in parameter.tensors:
        piece = tensors.read(name).astype(dtype)
        if not np.isfinite(piece).all():
            raise LayerwaveError(f"{tensors.files[name]}: tensor {name} holds NaN or infinity; download it again")
        pieces.append(piece.T if parameter.transposed else piece)
    return np.stack(pieces) if parameter.stacked else np.ascontiguousarray(pieces[0])


def _check_tensors(parameters: list[_Parameter], tensors: TensorFiles, config: DecoderConfig) -> None:
    wanted = {name: p.shape for p in parameters for name in p.tensors}
    given = {name for name in tensors.files if not name.endswith(_DERIVED_SUFFIXES)}
    if config.tie_embeddings and {"lm_head.weight", "model.embed_tokens.weight"} <= given:
        if not np.array_equal(tensors.read("lm_head.weight"), tensors.read("model.embed_tokens.weight")):
            raise LayerwaveError(
                "config.json says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false"
            )
        given.discard("lm_head.weight")
    faults = [f"missing {name}" for name in sorted(wanted.keys() - given)]
    faults += [f"unused {name}" for name in sorted(given - wanted.keys())]
    for name in sorted(wanted.keys() & given):
        shape = tensors.shape(name)
        if shape != wanted[name]:
            faults.append(f"misshapen {name}: got {shape}, expected {wanted[name]}")
    if faults:
        raise LayerwaveError(
            f"checkpoint does not fit its config.json, {len(faults)} faults: {'; '.join(faults)}; "
            "correct config.json or download the checkpoint again"
        )


def save_decoder(decoder: Decoder, path: Path, dtype: DTypeLike) -> None:
    """Writes `path` (a `model.safetensors`) with the tensor names that `load_decoder` and transformers read."""
    tensors = {}
    flat = dict(nnx.to_flat_state(nnx.state(decoder, nnx.Param)))
    for parameter in _parameters(decoder):
        value = np.asarray(jax.device_get(flat[parameter.path][...])).astype(dtype)
        for name, piece in zip(parameter.tensors, value if parameter.stacked else [value], strict=True):
            tensors[name] = np.ascontiguousarray(piece.T if parameter.transposed else piece)
    save_file(tensors, path, metadata={"format": "pt"})
