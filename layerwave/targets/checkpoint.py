"""Hugging Face safetensors directories <-> parameters of a module.

A parameter's path in the module is its tensor's name in the file: `layers.self_attn.q_proj.kernel` stands for the
tensors `model.layers.{l}.self_attn.q_proj.weight` of all `l`, transposed and stacked. Drafts are read and written by
the same rules.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike
from safetensors import safe_open
from safetensors.numpy import save_file

from layerwave.errors import LayerwaveError
from layerwave.files.reading import inside, read_object, shown
from layerwave.files.tensors import open_tensors
from layerwave.files.writing import whole_file
from layerwave.targets.config import DecoderConfig
from layerwave.targets.decoder import PARTITION, Decoder
from layerwave.targets.families import FAMILIES
from layerwave.targets.mesh import MODEL, on_mesh

_LEAF_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}
# Tables that some checkpoints carry and that are computed here.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_SINGLE, _AGAIN = "model.safetensors", "download it again"
_MOST_CLAIMED = 100
"""How many times more than the files hold a config may describe before nothing is made of it: so far apart are no two
models that were mistaken for each other."""


@runtime_checkable
class Tensor(Protocol):
    """An array, or what gives one when it is indexed."""

    def __getitem__(self, index: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class TensorFiles:
    """Where each tensor of a checkpoint lies; nothing is read until it is asked for."""

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def open(cls, directory: Path) -> "TensorFiles":
        """Indexes `model.safetensors`, or the shards that `model.safetensors.index.json` names.

        Raises:
          LayerwaveError: neither file is there, a shard is missing or outside the directory, a file is truncated or
            lies about itself, or an index is wrong.
        """
        index, single = (inside(directory, name, _AGAIN) for name in (_SINGLE + ".index.json", _SINGLE))
        if index.is_file():
            weight_map = read_object(index, _AGAIN).get("weight_map")
            if not isinstance(weight_map, dict):
                raise LayerwaveError(f"{index}: not a checkpoint index (weight_map is {shown(weight_map)}); {_AGAIN}")
            shards = {str(shard): inside(directory, shard, _AGAIN) for shard in weight_map.values()}
            missing = sorted(name for name, path in shards.items() if not path.is_file())
            if missing:
                raise LayerwaveError(f"{directory}: shards named by the index are missing: {', '.join(missing)}")
            files = {name: shards[shard] for name, shard in weight_map.items()}
            held = {path: _shapes(path) for path in shards.values()}
            strayed = sorted(name for name, path in files.items() if name not in held[path])
            if strayed:
                raise LayerwaveError(f"{index}: tensors that their shard does not hold: {', '.join(strayed)}")
            return cls(files, {name: held[path][name] for name, path in files.items()})
        if single.is_file():
            shapes = _shapes(single)
            return cls(dict.fromkeys(shapes, single), shapes)
        raise LayerwaveError(
            f"{directory}: neither model.safetensors nor model.safetensors.index.json is there; "
            "only safetensors checkpoints are read"
        )

    @property
    def has_head(self) -> bool:
        return any(name.split(".")[-2:] == ["lm_head", "weight"] for name in self.files)

    @property
    def numbers(self) -> int:
        """In all tensors together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def slices(self, name: str) -> "Tensor":
        """The tensor, of which indexing reads a part."""
        with safe_open(self.files[name], framework="numpy") as file:
            return file.get_slice(name)

    def read(self, name: str) -> np.ndarray:
        with safe_open(self.files[name], framework="numpy") as file:
            return file.get_tensor(name)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of all tensors in a file: its header is read once, and checked."""
    with open_tensors(path, "not a readable safetensors file", _AGAIN) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module and the tensors it is made of."""

    path: tuple
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    """Of each tensor."""
    transposed: bool
    stack: tuple[int, ...] = ()
    """Leading axes of the parameter over which there is a tensor each: layers, or layers and experts."""
    rows: tuple[int, int] | None = None
    """Of each tensor, those of this parameter, where a tensor holds several; None: all."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        first, *rest = self.shape
        shape = (first if self.rows is None else self.rows[1] - self.rows[0], *rest)
        return (*self.stack, *(shape[::-1] if self.transposed else shape))

    def assemble(
        self, read: Callable[[str], Tensor], dtype: DTypeLike, index: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """The parameter, or the part of it at `index`, from its tensors, of which no more is read than that part.

        There is one copy of it, and of one tensor at a time. Raises `LayerwaveError` for NaN, infinity and what is no
        floating-point number, naming the tensor.
        """
        index = index or (slice(None),) * len(self.whole)
        index = tuple(slice(*cut.indices(size)) for cut, size in zip(index, self.whole, strict=True))
        part = _aligned([cut.stop - cut.start for cut in index], np.dtype(dtype))
        outer, inner = index[: len(self.stack)], index[len(self.stack) :]
        names = np.asarray(np.array(self.tensors, object).reshape(self.stack)[outer], object).ravel()
        first, *rest = inner[::-1] if self.transposed else inner
        begin = self.rows[0] if self.rows else 0
        inner = (slice(begin + first.start, begin + first.stop), *rest)
        for name, piece in zip(names, part.reshape(-1, *part.shape[len(self.stack) :]), strict=True):
            tensor = read(name)[inner]
            if tensor.dtype.kind != "f" and tensor.dtype.name != "bfloat16":
                raise LayerwaveError(
                    f"tensor {name} is {tensor.dtype}, expected floating-point numbers; quantised checkpoints are not "
                    "read"
                )
            piece[...] = tensor.T if self.transposed else tensor
            if not np.isfinite(piece).all():
                raise LayerwaveError(f"tensor {name} holds NaN or infinity; download or save the checkpoint again")
        return part

    def place(self, read: Callable[[str], Tensor], dtype: DTypeLike, sharding: Sharding) -> jax.Array:
        """The parameter on the devices of `sharding`; what several of them hold is read once."""
        parts: dict[str, np.ndarray] = {}

        def part(index: tuple[slice, ...]) -> np.ndarray:
            if str(index) not in parts:
                parts[str(index)] = self.assemble(read, dtype, index)
            return parts[str(index)]

        return jax.make_array_from_callback(self.whole, sharding, part)

    def pieces(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """What the parameter puts into its tensors, by name."""
        for name, piece in zip(self.tensors, value.reshape(-1, *value.shape[len(self.stack) :]), strict=True):
            yield name, np.ascontiguousarray(piece.T if self.transposed else piece)


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Room for an array where XLA wants arrays to be: on the CPU the device then takes it over and makes no copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def parameters(module: nnx.Module, names: Callable[[list[str]], list[str]]) -> list[Parameter]:
    """The parameters of a module; `names` gives the tensors' names, without their last part, of a path.

    Parameters below an attribute `layers` are stacked, one tensor a layer; those below `experts` too, one tensor an
    expert, whose number stands behind `experts` in the name.
    """
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        *modules, leaf = path
        depth, transposed = sum(part in ("layers", "experts") for part in modules), leaf == "kernel"
        stack, shape = variable.shape[:depth], variable.shape[depth:]
        tensors = [f"{name}.{_LEAF_NAMES[leaf]}" for name in names([str(part) for part in modules])]
        if "experts" in modules:
            tensors = [name.replace(".experts.", f".experts.{e}.") for name in tensors for e in range(stack[-1])]
        found.append(Parameter(path, tuple(tensors), shape[::-1] if transposed else shape, transposed, stack))
    return found


def fused(found: list[Parameter], tensors: Mapping[str, tuple[str, ...]]) -> list[Parameter]:
    """The parameters of a checkpoint whose tensors hold the rows of several of them: which ones, by their modules."""
    by_module = {p.path[:-1]: p for p in found}
    changed = {}
    for name, parts in tensors.items():
        for module in {path[:-1] for path in by_module if path[-1] == parts[0]}:
            members = [by_module[(*module, part)] for part in parts]
            ends = np.cumsum([p.shape[0] for p in members]).tolist()
            for part, p, end in zip(parts, members, ends, strict=True):
                changed[p.path] = replace(
                    p,
                    tensors=tuple(tensor.replace(f".{part}.", f".{name}.") for tensor in p.tensors),
                    shape=(ends[-1], *p.shape[1:]),
                    rows=(end - p.shape[0], end),
                )
    return [changed.get(p.path, p) for p in found]


def load_parameters(
    module: nnx.Module,
    wanted: list[Parameter],
    read: Callable[[str], Tensor],
    dtype: DTypeLike,
    sharding: Callable[[Parameter], Sharding] | None = None,
) -> None:
    """Puts what `read` gives by name into the module, cast to `dtype`; `require_tensors` has been called before.

    Where no `sharding` is given, parameters are on the default device.
    """
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    loaded = {}
    # The largest first: beside what is placed there is one parameter on the host, and at the end a small one.
    for p in sorted(wanted, key=lambda p: -math.prod(p.whole)):
        if sharding is None:
            loaded[p.path] = jax.device_put(p.assemble(read, dtype))
        else:
            loaded[p.path] = p.place(read, dtype, sharding(p))
    nnx.update(module, nnx.from_flat_state([(path, variable.replace(loaded[path])) for path, variable in state]))


def tensors_of(module: nnx.Module, wanted: list[Parameter], dtype: DTypeLike) -> dict[str, np.ndarray]:
    """The module's parameters as tensors by name, cast to `dtype`."""
    flat = dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))
    values = {p: np.asarray(jax.device_get(flat[p.path][...])).astype(dtype) for p in wanted}
    parts: dict[str, list[np.ndarray]] = {}
    for p in sorted(wanted, key=lambda p: p.rows or (0, 0)):
        for name, piece in p.pieces(values[p]):
            parts.setdefault(name, []).append(piece)
    return {name: np.concatenate(pieces) for name, pieces in parts.items()}


def require_tensors(wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """Raises one `LayerwaveError` that lists every missing, unused and misshapen tensor, by names and shapes."""
    faults = [f"missing {name}" for name in sorted(wanted.keys() - given.keys())]
    faults += [f"unused {name}" for name in sorted(given.keys() - wanted.keys())]
    faults += [
        f"misshapen {name}: got {given[name]}, expected {wanted[name]}"
        for name in sorted(wanted.keys() & given.keys())
        if given[name] != wanted[name]
    ]
    if faults:
        raise LayerwaveError(
            f"checkpoint does not fit its config.json, {len(faults)} faults: {'; '.join(faults)}; "
            "correct config.json or download the checkpoint again"
        )


def load_decoder(config: DecoderConfig, tensors: TensorFiles, dtype: DTypeLike, mesh: Mesh | None = None) -> Decoder:
    """A decoder with the parameters of a checkpoint, cast to `dtype`, on one device or shared out on a mesh.

    Of each file only what this process holds is read.

    Raises:
      LayerwaveError: one message that lists every missing, unused and misshapen tensor.
    """
    require_proportion(config, tensors)
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    family = FAMILIES[config.model_type].tensors
    roots = [root for root in family.roots if any(name.startswith(root) for name in tensors.files)]
    root, head = next(((root, family.roots[root]) for root in roots), next(iter(family.roots.items())))
    wanted = decoder_parameters(decoder, root, head)
    unread = {name for name in tensors.files if name.endswith(_DERIVED_SUFFIXES) or name.startswith(family.towers)}
    given = set(tensors.files) - unread
    head, embedding = f"{head}.weight", f"{root}embed_tokens.weight"
    if config.tie_embeddings and {head, embedding} <= given:
        if not _equal(tensors, head, embedding):
            raise LayerwaveError(
                f"config.json says tie_word_embeddings, but {head} differs from {embedding}; "
                "set tie_word_embeddings to false"
            )
        given.discard(head)
    require_tensors(
        {name: p.shape for p in wanted for name in p.tensors}, {name: tensors.shapes[name] for name in given}
    )
    sharding = None if mesh is None else lambda p: on_mesh(mesh, *partition(p, config, mesh))
    load_parameters(decoder, wanted, tensors.slices, dtype, sharding)
    return decoder


def require_proportion(config: DecoderConfig, tensors: TensorFiles) -> None:
    """Raises `LayerwaveError` for a config of sizes that its files are far from holding, before any list is as long."""
    experts = config.experts
    count, size = (experts.count, experts.size) if experts else (1, config.intermediate_size)
    layer = config.hidden_size * (2 * config.num_heads * config.head_dim + 3 * count * size)
    numbers = config.vocab_size * config.hidden_size + config.num_layers * layer
    described = {"numbers": (numbers, tensors.numbers), "tensors": (config.num_layers * count, len(tensors.files))}
    for what, (claimed, held) in described.items():
        if claimed > _MOST_CLAIMED * max(held, 1):
            raise LayerwaveError(
                f"config.json describes at least {claimed:,} {what}, the checkpoint holds {held:,}: they belong to "
                "different models; download both again"
            )


def _equal(tensors: TensorFiles, first: str, second: str, rows: int = 4096) -> bool:
    """Whether two tensors are the same; a few rows at a time, since each may be a large part of a model."""
    if (shape := tensors.shapes[first]) != tensors.shapes[second]:
        return False
    a, b = tensors.slices(first), tensors.slices(second)
    cuts = [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]
    return all(np.array_equal(a[cut], b[cut]) for cut in cuts)


def partition(p: Parameter, config: DecoderConfig, mesh: Mesh) -> tuple[str | None, ...]:
    """The axes of a mesh on which each axis of a decoder's parameter lies, by `decoder.PARTITION`."""
    spec: list[str | None] = [None] * len(p.whole)
    *_, module, leaf = p.path
    side, heads = PARTITION.get(module, (None, None))
    axis = {"columns": -1, "rows": -2 if leaf in ("kernel", "embedding") else None}.get(side)
    if axis is not None and (getattr(config, heads) if heads else p.whole[axis]) % mesh.shape[MODEL] == 0:
        spec[axis] = MODEL
    return tuple(spec)


def abstract_parameters(config: DecoderConfig) -> list[Parameter]:
    """The parameters that a decoder has, without any of them in memory."""
    return decoder_parameters(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def save_decoder(decoder: Decoder, path: Path, dtype: DTypeLike) -> None:
    """Writes `path` (a `model.safetensors`) with the tensor names that `load_decoder` and transformers read.

    Raises `LayerwaveError` when it cannot be written.
    """
    with whole_file(path) as partial:
        save_file(tensors_of(decoder, decoder_parameters(decoder), dtype), partial, metadata={"format": "pt"})


def decoder_parameters(decoder: Decoder, root: str | None = None, head: str | None = None) -> list[Parameter]:
    """The parameters of a decoder. root, head: what the names of the tensors of its family begin with, and the name of
    the head's; by default as the family is saved by itself."""
    family = FAMILIES[decoder.config.model_type].tensors
    if root is None:
        root, head = next(iter(family.roots.items()))

    def names(modules: list[str]) -> list[str]:
        modules = [family.parts.get(part, part) for part in modules]
        if modules[0] == "layers":
            return [f"{root}{'.'.join(['layers', str(l), *modules[1:]])}" for l in range(decoder.config.num_layers)]
        return [head if modules[0] == "lm_head" else root + ".".join(modules)]

    return fused(parameters(decoder, names), family.fused)
