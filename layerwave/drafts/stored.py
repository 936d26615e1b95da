"""The target's states of every row, stored once and read back in every epoch instead of running the target.

Only the union of the layer sets and the final-normed states are kept, in the dtype in which the target computed them,
so that nothing is rounded: a target loaded in bfloat16 takes half the disk. Each batch of rows is one safetensors file,
written whole or not at all, so that an interrupted pass goes on where it was.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int
from safetensors import safe_open
from safetensors.numpy import save_file

from layerwave.drafts.loader import PADDING, Rows
from layerwave.drafts.stacks import Observed, observe
from layerwave.errors import LayerwaveError
from layerwave.files.reading import read_object
from layerwave.files.tensors import open_tensors
from layerwave.files.writing import make_folder, whole_file, write_json
from layerwave.targets import Target

SCHEMA, VERSION = "layerwave.states", 1
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_REMEDY = "delete the folder, and the states are stored again"


@dataclass(frozen=True)
class StoredStates:
    """States of all rows on disk. A file holds `rows_per_file` rows; shapes are of one row."""

    folder: Path
    rows_per_file: int
    shapes: dict[str, tuple[int, ...]]
    dtype: np.dtype

    @classmethod
    def plan(
        cls, target: Target, rows: Rows, layers: Sequence[int], rows_per_file: int, folder: Path
    ) -> "StoredStates":
        """Where the states of these rows go; nothing is written."""
        width = target.config.hidden_size
        shapes = {"states": (len(layers), rows.length, width), "normed": (rows.length, width)}
        return cls(folder, rows_per_file, shapes, jnp.dtype(target.decoder.dtype))

    def gigabytes(self, rows: int) -> float:
        return rows * sum(int(np.prod(shape)) for shape in self.shapes.values()) * self.dtype.itemsize / 1e9

    def file(self, number: int) -> Path:
        return self.folder / f"states-{number:06d}.safetensors"

    def read(self, rows: Int[np.ndarray, " b"]) -> Observed:
        """The states of these rows; zeros for `PADDING`."""
        found = {name: np.zeros((len(rows), *shape), self.dtype) for name, shape in self.shapes.items()}
        for place, row in enumerate(rows.tolist()):
            if row == PADDING:
                continue
            path = self.file(row // self.rows_per_file)
            with open_tensors(path, "not a file of stored states", _REMEDY) as file:
                for name, array in found.items():
                    _require_held(file, path, name, row % self.rows_per_file, array)
                    array[place] = file.get_slice(name)[row % self.rows_per_file]
        return Observed(np.swapaxes(found["states"], 0, 1), found["normed"])


def store_states(
    target: Target,
    rows: Rows,
    layers: tuple[int, ...],
    stored: StoredStates,
    announce: Callable[[str], None],
) -> None:
    """Runs the target over the rows whose file is not there yet; announces every tenth of them.

    Raises:
        LayerwaveError: the folder holds states of another target, data or layers (every difference is named).
    """
    _claim(stored, target, rows, layers)
    target_def, target_params = nnx.split(target.decoder)
    files = -(-len(rows.plan) // stored.rows_per_file)
    for number, chosen in enumerate(rows.in_order(stored.rows_per_file)):
        path = stored.file(number)
        if not path.is_file():
            found = observe(target_def, target_params, rows.batch(chosen), jnp.array(layers))
            states, normed = jax.device_get(found)
            with whole_file(path) as partial:
                save_file({"states": np.ascontiguousarray(np.swapaxes(states, 0, 1)), "normed": normed}, partial)
        if 10 * (number + 1) // files > 10 * number // files:
            announce(f"{number + 1} of {files} files in {stored.folder}")


def require_disk(gigabytes: float, folder: Path, most: float) -> None:
    """Raises `LayerwaveError` when the states would take more than `most` gigabytes, or more than the disk has."""
    if gigabytes > most:
        raise LayerwaveError(
            f"the states would take {gigabytes:.1f} GB, but max_disk_gb is {most:g}: raise it, give fewer "
            "conversations or layers, load the target in bfloat16, or train without stored states"
        )
    make_folder(folder)
    free = shutil.disk_usage(folder).free / 1e9
    if gigabytes > free:
        raise LayerwaveError(f"the states would take {gigabytes:.1f} GB, but {folder} has {free:.1f} GB left")


def _require_held(file: safe_open, path: Path, name: str, row: int, array: np.ndarray) -> None:
    """Raises `LayerwaveError` unless the file has this row of what the array takes."""
    held = file.get_slice(name) if name in file.keys() else None
    shape, dtype = (tuple(held.get_shape()), held.get_dtype()) if held else ((), "nothing")
    if dtype != _DTYPES.get(array.dtype.name) or shape[1:] != array.shape[1:] or row >= shape[0]:
        raise LayerwaveError(
            f"{path}: {name} is {dtype} of shape {shape}, expected row {row} of {array.dtype} {array.shape[1:]}; "
            f"{_REMEDY}"
        )


def _claim(stored: StoredStates, target: Target, rows: Rows, layers: tuple[int, ...]) -> None:
    """Writes what the folder holds, or compares it."""
    digest = hashlib.sha256()
    for row in rows.plan:
        digest.update(np.array([rows.examples[i].fingerprint for i in row], "<u8").tobytes() + b"/")
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        "target fingerprint": target.fingerprint,
        "dtype": str(stored.dtype),
        "layers": list(layers),
        "tokens in a row": rows.length,
        "rows in a file": stored.rows_per_file,
        "rows": digest.hexdigest(),
        "norm": "states before the final norm, normed after it",
    }
    make_folder(stored.folder)
    path = stored.folder / "states.json"
    if not path.is_file():
        write_json(path, content)
        return
    found = read_object(path, "delete the folder, or name another")
    different = [
        f"{key} was {found.get(key)!r}, is {content[key]!r}" for key in content if found.get(key) != content[key]
    ]
    if different:
        raise LayerwaveError(f"{stored.folder} holds other states: {'; '.join(different)}; delete them or name another")
