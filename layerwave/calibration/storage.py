"""The file of a calibration: one `.safetensors` whose header holds, as JSON, all that is not an array."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from layerwave.calibration.replicates import SHARES
from layerwave.calibration.settings import POOLS, CalibrationSettings
from layerwave.errors import LayerwaveError
from layerwave.files import whole_file

FORMAT = "layerwave.calibration"
FORMAT_VERSION = 2

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
_HEADER = ("target_name", "target_fingerprint", "target_dtype", "tallies")
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
        partial.write_bytes(save(kept, metadata))


def read(
    path: str | os.PathLike[str],
) -> tuple[CalibrationSettings | None, dict[str, str], dict[str, np.ndarray]]:
    """Settings, header and arrays of a file that `write` wrote.

    Raises:
        LayerwaveError: no such file, not a safetensors file, not a calibration, another format version, or a header
            or arrays that are missing or do not fit together.
    """
    if not Path(path).is_file():
        raise LayerwaveError(f"cannot read {path} (no such file): name a saved calibration")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys() if name in ARRAYS | REPLICATE_ARRAYS}
    except (OSError, SafetensorError) as error:
        raise LayerwaveError(f"cannot read {path} (not a whole safetensors file: {error}): {_REMEDY}") from error
    if header.get("format") != FORMAT:
        raise LayerwaveError(
            f"{path} is a safetensors file of format {header.get('format')!r}, but must be {FORMAT!r}: "
            "name a file that `layerwave calibrate` wrote"
        )
    if header.get("format_version") != str(FORMAT_VERSION):
        raise LayerwaveError(
            f"{path} has format version {header.get('format_version')} (layerwave "
            f"{header.get('layerwave_version')}), but must have {FORMAT_VERSION}: {_REMEDY}"
        )
    try:
        settings = json.loads(header["settings"])
        settings = None if settings is None else CalibrationSettings(**settings)
        json.loads(header["tallies"])
        kept = {name: header[name] for name in _HEADER}
    except (KeyError, ValueError, TypeError, LayerwaveError) as error:
        raise LayerwaveError(f"{path} has a header that cannot be read ({error}): {_REMEDY}") from error
    if fault := _fault(arrays, settings):
        raise LayerwaveError(f"{path} is damaged ({fault}): {_REMEDY}")
    return settings, kept, arrays


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
    if missing := [name for name in expected if name not in arrays]:
        return f"it lacks {', '.join(missing)}"
    for name, (dtype, axes) in expected.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != len(axes):
            return f"{name} is {array.dtype} with {array.ndim} axes, expected {np.dtype(dtype)} {axes}"
        for axis, size in zip(axes, array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                return f"{name} has shape {array.shape}, expected {sizes[axis]} on axis {axis} of {axes}"
    return None
