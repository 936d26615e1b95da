"""The file of a calibration: one `.safetensors` whose header holds, as JSON, all that is not an array."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from layerwave.calibration.replicates import SHARES
from layerwave.calibration.settings import POOLS, CalibrationSettings
from layerwave.errors import LayerwaveError
from layerwave.files.reading import parse_json, shown, typed
from layerwave.files.tensors import open_tensors
from layerwave.files.writing import whole_file, write_tensors

FORMAT = "layerwave.calibration"
FORMAT_VERSION = 3

# Letters as in `Calibration`; C accumulators of the replicates.
ARRAYS = {
    "sums": (np.float32, "PNBD"),
    "counts": (np.int64, "P"),
    "curves": (np.float32, "PSN"),
    "kept": (np.int64, "PS"),
    "lengths": (np.int64, "S"),
    "sinks": (np.int64, "S"),
    "fingerprints": (np.uint64, "S"),
}
REPLICATE_ARRAYS = {
    "replicate_grams": (np.float64, "CNBB"),
    "replicate_centred": (np.float64, "CNBB"),
    "replicate_sums": (np.float32, "CNBD"),
}
# Letters as in `TokenSample`; Y of the Q positions score. The states are of one of two dtypes, all of the same.
_STATES = (np.float32, jnp.bfloat16)
TOKEN_ARRAYS = {
    "token_states": (_STATES, "NQW"),
    "token_embeddings": (_STATES, "QD"),
    "token_normed": (_STATES, "QD"),
    "token_head": (_STATES, "RD"),
    "token_vocabulary": (np.int32, "R"),
    "token_top_tokens": (np.int32, "YK"),
    "token_log_normaliser": (np.float32, "Y"),
    "token_samples": (np.uint64, "Q"),
    "token_positions": (np.int32, "Q"),
    "token_priorities": (np.uint64, "Q"),
    "token_sinks": (np.bool_, "Q"),
}
_HEADER = ("target_name", "target_fingerprint", "target_dtype", "data_fingerprint", "tallies", "checks", "warnings")
_REMEDY = "make it again with `layerwave calibrate`"


def write(
    path: str | os.PathLike[str],
    *,
    settings: CalibrationSettings | None,
    header: Mapping[str, str],
    arrays: Mapping[str, np.ndarray | None],
) -> None:
    """Writes the file whole or not at all; arrays that are None are left out. Raises `LayerwaveError` if it cannot."""
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "layerwave_version": version("layerwave"),
        "settings": json.dumps(asdict(settings) if settings else None),
        "pools": json.dumps(["/".join(pool) for pool in POOLS] if settings else ["given"]),
        **header,
    }
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    with whole_file(path) as partial:
        write_tensors(partial, kept, metadata)


def read(
    path: str | os.PathLike[str],
) -> tuple[CalibrationSettings | None, dict[str, str], dict[str, np.ndarray]]:
    """Settings, header and arrays of a file that `write` wrote.

    Raises:
        LayerwaveError: no such file, not a safetensors file, not a calibration, another format version, or a header
            or arrays that are missing or do not fit together.
    """
    settings, header = read_header(path)
    known = ARRAYS | REPLICATE_ARRAYS | TOKEN_ARRAYS
    with _opened(path) as file:
        arrays = {name: file.get_tensor(name) for name in file.keys() if name in known}
    if fault := _fault(arrays, settings):
        raise LayerwaveError(f"{path} is damaged ({fault}): {_REMEDY}")
    return settings, header, arrays


def read_header(path: str | os.PathLike[str]) -> tuple[CalibrationSettings | None, dict[str, str]]:
    """The same without the arrays: a few kilobytes of the file, whose length is checked."""
    if not Path(path).is_file():
        raise LayerwaveError(f"cannot read {path} (no such file): name a saved calibration")
    with _opened(path) as file:
        header = file.metadata() or {}
    if header.get("format") != FORMAT:
        raise LayerwaveError(
            f"{path} is a safetensors file of format {shown(header.get('format'))}, but must be {FORMAT!r}: "
            "name a file that `layerwave calibrate` wrote"
        )
    if header.get("format_version") != str(FORMAT_VERSION):
        raise LayerwaveError(
            f"{path} has format version {shown(header.get('format_version'))} (layerwave "
            f"{shown(header.get('layerwave_version'))}), but must have {FORMAT_VERSION}: {_REMEDY}"
        )
    header = {"checks": "{}", "warnings": "[]"} | header  # older artifacts have neither
    if missing := [name for name in ("settings", *_HEADER) if name not in header]:
        raise LayerwaveError(f"{path} has a header that cannot be read (it lacks {', '.join(missing)}): {_REMEDY}")
    said = f"{path} has a header that"
    settings, tallies = (parse_json(header[name], said, _REMEDY) for name in ("settings", "tallies"))
    try:
        typed(dict[str, int], tallies, "tallies")
        settings = typed(CalibrationSettings | None, settings, "settings")
        typed(dict[str, float], parse_json(header["checks"], said, _REMEDY), "checks")
        typed(tuple[str, ...], parse_json(header["warnings"], said, _REMEDY), "warnings")
    except LayerwaveError as error:
        raise LayerwaveError(f"{path} has a header that cannot be read ({error}): {_REMEDY}") from None
    return settings, {name: header[name] for name in _HEADER}


def is_calibration(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a calibration, of this format version or another."""
    try:
        with _opened(path) as file:
            return (file.metadata() or {}).get("format") == FORMAT
    except LayerwaveError:
        return False


def _opened(path: str | os.PathLike[str]):
    return open_tensors(path, "not a whole safetensors file", _REMEDY)


def _fault(arrays: dict[str, np.ndarray], settings: CalibrationSettings | None) -> str | None:
    """Say what is missing or does not fit together in arrays that came from a file."""
    sizes = {"P": 1} if settings is None else {"P": len(POOLS), "B": settings.block}
    expected = dict(ARRAYS)
    if arrays.keys() & REPLICATE_ARRAYS.keys():
        sizes["C"] = len(SHARES) + (settings.replicates if settings else 0)
        optional = "replicate_sums" not in arrays
        expected |= {
            name: kind for name, kind in REPLICATE_ARRAYS.items() if not (optional and name == "replicate_sums")
        }
    if arrays.keys() & TOKEN_ARRAYS.keys():
        expected |= TOKEN_ARRAYS
    if missing := [name for name in expected if name not in arrays]:
        return f"it lacks {', '.join(missing)}"
    for name, (dtype, axes) in expected.items():
        array = arrays[name]
        kinds = [np.dtype(kind) for kind in (dtype if isinstance(dtype, tuple) else (dtype,))]
        if array.dtype not in kinds or array.ndim != len(axes):
            names = " or ".join(kind.name for kind in kinds)
            return f"{name} is {array.dtype} with {array.ndim} axes, expected {names} {axes}"
        for axis, size in zip(axes, array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                return f"{name} has shape {array.shape}, expected {sizes[axis]} on axis {axis} of {axes}"
    return _count_fault(arrays) or (_token_fault(arrays) if "token_states" in arrays else None)


def _count_fault(arrays: dict[str, np.ndarray]) -> str | None:
    """Say what no pass can have left in arrays that have their right dtypes and axes."""
    if 0 in arrays["sums"].shape:
        return f"sums has shape {arrays['sums'].shape}, expected layers, tokens and features"
    for name, array in arrays.items():
        if name != "curves" and array.dtype.kind not in "iub" and not np.isfinite(array).all():
            return f"{name} holds NaN or infinity"
    for name in ("counts", "kept", "lengths", "sinks"):
        if (arrays[name] < 0).any():
            return f"{name} counts below 0"
    for name in ("kept", "sinks"):
        if (arrays[name] > arrays["lengths"]).any():
            return f"{name} counts more tokens than lengths does"
    if len(np.unique(arrays["fingerprints"])) < len(arrays["fingerprints"]):
        return "fingerprints names a sample twice"
    return None


def _token_fault(arrays: dict[str, np.ndarray]) -> str | None:
    """Say what contradicts itself in a token sample whose arrays have their right dtypes and axes."""
    dtypes = {arrays[name].dtype.name for name, (kind, _) in TOKEN_ARRAYS.items() if kind is _STATES}
    if len(dtypes) > 1:
        return f"the token sample's states are {' and '.join(sorted(dtypes))}, expected one dtype"
    samples, top_tokens = arrays["token_samples"], arrays["token_top_tokens"]
    first = len(samples) - len(top_tokens)
    if first < 0:
        return f"token_top_tokens has {len(top_tokens)} rows, expected at most {len(samples)}, one a position"
    if arrays["token_states"].shape[2] > arrays["token_embeddings"].shape[1]:
        return f"token_states has shape {arrays['token_states'].shape}, wider than the model"
    if arrays["token_states"].shape[2] == 0:
        return f"token_states has shape {arrays['token_states'].shape}, of no features"
    if not np.array_equal(arrays["token_vocabulary"], np.unique(top_tokens)):
        return "token_vocabulary is not the ascending union of token_top_tokens"
    if not np.isin(samples, arrays["fingerprints"]).all():
        return "token_samples names samples that fingerprints does not"
    if np.isin(samples[:first], samples[first:]).any():
        return "token_samples has a sample that both fits and scores"
    return None
