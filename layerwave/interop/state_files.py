"""Files of hidden states as samples of a calibration: of vLLM and speculators, or plain arrays.

Each file says by its tensors what it is. What it cannot say, the user has to: the number of layers, how slices are
numbered, and on which side of the final norm the last one was taken (speculators: always before).
"""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from layerwave.calibration.given import FinalState, GivenStates, Numbering
from layerwave.errors import LayerwaveError
from layerwave.files.reading import inside
from layerwave.files.tensors import open_tensors
from layerwave.interop.hidden_states import read_speculators

_BESIDE = {"entropies": ("numbers", "fiu"), "mask": ("0 and 1", "biuf"), "token_ids": ("whole numbers", "iu")}
"""Arrays beside the states: what they hold, and the kinds of dtypes that do."""
_FORMS = (
    "hs_*.safetensors of speculators, or plain arrays: states (layers, tokens, features) with, where there are any, "
    f"{', '.join(_BESIDE)} (tokens), in one .safetensors, or in NAME.npy and NAME.entropies.npy, …"
)


class StateFiles(Sequence[GivenStates]):
    """Samples that are read from files when they are asked for, in the order of paths and of numbers in file names.

    Args:
        paths: files, or folders of them.
        num_layers: of the target, N.
        ids: the boundaries that were captured, as given to launch_vllm, with or without N; for files of speculators,
            which do not say. All layers have to be among them.
        numbering: for plain arrays: `output`, their N slices are the outputs of layers 0 ... N-1; `boundary`, they
            have N+1, the embedding first (Hugging Face's `hidden_states`).
        final_state: for plain arrays: whether the last slice is from before or after the final norm.

    Raises:
        LayerwaveError: nothing there; on reading, a file of another form, one that lacks layers (with the remedy),
            what a plain array needs and was not given, or a statement that contradicts the file.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        num_layers: int,
        *,
        ids: Iterable[int] | None = None,
        numbering: Numbering | None = None,
        final_state: FinalState | None = None,
    ):
        self.files = [file for path in paths for file in _files(Path(path))]
        if num_layers < 1:
            raise LayerwaveError(f"num_layers is {num_layers}, but must be the number of the target's layers")
        self.num_layers = num_layers
        self.ids = None if ids is None else list(ids)
        self.numbering = numbering
        self.final_state = final_state

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> GivenStates:
        path = self.files[index]
        names = _names(path)
        if "hidden_states" in names:
            return self._speculators(path)
        if "states" not in names or names - {"states", *_BESIDE}:
            raise LayerwaveError(f"{path} holds {', '.join(sorted(names)[:9]) or 'nothing'}: expected {_FORMS}")
        return self._plain(path)

    def _speculators(self, path: Path) -> GivenStates:
        if self.numbering == "output" or self.final_state == "post_norm":
            raise LayerwaveError(
                f"{path}: files of speculators number boundaries and end before the final norm, which contradicts "
                f"numbering={self.numbering}, final_state={self.final_state}: leave both out"
            )
        N = self.num_layers
        ids = None if self.ids is None else [k for k in self.ids if k != N]
        try:
            stored = read_speculators(path, N, ids)
        except LayerwaveError as error:
            raise LayerwaveError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
        if missing := sorted(set(range(N - 1)) - set(stored.layers)):
            raise LayerwaveError(_lacks(path, missing, N))
        states = np.concatenate([stored.states[: N - 1], stored.final[None]])
        if len(stored.states) == N and not np.array_equal(stored.states[-1], stored.final):
            raise LayerwaveError(
                f"{path}: the slice of boundary {N} differs from the last one, which is to be the same state: one of "
                "them was taken after the final norm, or the ids are of another capture"
            )
        return _given(path, states, _read(path, _BESIDE), "pre_norm", "boundary")

    def _plain(self, path: Path) -> GivenStates:
        if self.ids is not None:
            raise LayerwaveError(f"{path} is a plain array, which has all layers in order: leave ids out")
        unsaid = [
            f"{name} ({choices})"
            for name, value, choices in (
                ("numbering", self.numbering, "output: slices are the layers' outputs; boundary: embedding first"),
                ("final_state", self.final_state, "pre_norm or post_norm: the last slice and the final norm"),
            )
            if value is None
        ]
        if unsaid:
            raise LayerwaveError(
                f"{path} is a plain array, which cannot say {' nor '.join(unsaid)}: give what it lacks"
            )
        states, N = _read(path, ("states",))["states"], self.num_layers
        expected = N + (self.numbering == "boundary")
        if states.ndim != 3 or states.shape[0] != expected:
            raise LayerwaveError(
                f"{path}: states of shape {states.shape}, but {N} layers numbered by {self.numbering} make "
                f"({expected}, tokens, features): capture every layer, since sets are chosen among all of them"
            )
        if states.dtype.kind != "f" and states.dtype.name != "bfloat16":
            raise LayerwaveError(f"{path}: states are {states.dtype}, expected floating-point numbers")
        states = states[1:] if self.numbering == "boundary" else states
        return _given(path, states, _read(path, _BESIDE), self.final_state, self.numbering)


def _given(
    path: Path, states: np.ndarray, beside: dict[str, np.ndarray], final_state: FinalState, numbering: Numbering
) -> GivenStates:
    """The sample without its masked tokens; states other than bfloat16 as float32."""
    if 0 in states.shape:
        raise LayerwaveError(f"{path}: states of shape {states.shape}, expected layers, tokens and features in them")
    if states.dtype.name != "bfloat16":
        states = states.astype(np.float32)
    length = states.shape[1]
    columns = {name: beside.get(name) for name in _BESIDE}
    for name, array in columns.items():
        if array is None:
            continue
        if array.shape != (length,):
            raise LayerwaveError(f"{path}: {name} has shape {array.shape}, but the states have {length} tokens")
        holds, kinds = _BESIDE[name]
        if array.dtype.kind not in kinds and not (array.dtype.name == "bfloat16" and "f" in kinds):
            raise LayerwaveError(f"{path}: {name} are {array.dtype}, expected {holds}")
    entropies, mask, tokens = columns.values()
    if mask is not None:
        if not np.isin(mask, (0, 1)).all():
            raise LayerwaveError(f"{path}: mask holds more than 0 and 1: give True for tokens to be used")
        mask = mask.astype(bool)
        states = states[:, mask]
        entropies, tokens = (None if array is None else array[mask] for array in (entropies, tokens))
    return GivenStates(
        states=states,
        final_state=final_state,
        numbering=numbering,
        where=str(path),
        entropies=None if entropies is None else entropies.astype(np.float32),
        tokens=tokens,
        masked=length - states.shape[1],
    )


def _lacks(path: Path, missing: Sequence[int], num_layers: int) -> str:
    return (
        f"{path} lacks the outputs of {len(missing)} of {num_layers} layers, of layer {missing[0]} first. A set chosen "
        "among the captured layers alone would only order those, and rules, depths and transitions are of all: capture "
        f"all of them, boundaries 1 … {num_layers} (ids 1 … {num_layers - 1} for launch_vllm of speculators)"
    )


def _files(path: Path) -> list[Path]:
    """The file itself, or the state files of a folder; arrays that stand beside one are no samples."""
    try:
        if path.is_file():
            return [path]
        listed = [*path.iterdir()] if path.is_dir() else []
    except (OSError, ValueError) as error:
        raise LayerwaveError(f"{path} cannot be read ({error}): expected {_FORMS}") from None
    found = [
        inside(path, file.name, "name the file itself")
        for file in listed
        if file.suffix == ".safetensors" or (file.suffix == ".npy" and not _is_beside(file))
    ]
    if not found:
        raise LayerwaveError(f"{path} is no file and no folder of any: expected {_FORMS}")
    return sorted(found, key=_numerically)


def _numerically(file: Path) -> list[str | int]:
    """Puts hs_10 behind hs_9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)]


def _beside(path: Path, name: str) -> Path:
    return inside(path.parent, path.with_suffix(f".{name}.npy").name, "put the array itself there")


def _is_beside(file: Path) -> bool:
    return Path(file.stem).suffix.removeprefix(".") in _BESIDE


def _names(path: Path) -> set[str]:
    """What a file holds."""
    if path.suffix == ".npy":
        return {"states"}
    with open_tensors(path, "cannot be read", f"expected {_FORMS}") as file:
        return set(file.keys())


def _read(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of the named arrays that there are, in the file or beside a NAME.npy."""
    if path.suffix == ".npy":
        files = {name: path if name == "states" else _beside(path, name) for name in names}
        return {name: _read_npy(file) for name, file in files.items() if file.is_file()}
    with open_tensors(path, "cannot be read", f"expected {_FORMS}") as file:
        return {name: file.get_tensor(name) for name in names if name in file.keys()}


def _read_npy(path: Path) -> np.ndarray:
    """The array of a .npy, mapped: the shape that its header claims is held against the file, and no object loaded."""
    try:
        with np.errstate(over="ignore"):  # sizes that overflow are refused, too
            return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # the header is a Python literal, whose parsers let many errors pass through
        raise LayerwaveError(f"{path} cannot be read ({error}): expected {_FORMS}") from None
