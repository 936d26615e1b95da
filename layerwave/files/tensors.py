"""A safetensors file, opened once its header has been held against the file.

The library checks that tensors lie in the file, one behind the other and without a gap, so that no tensor is larger
than the file that holds it. What it lets pass is checked here: tensors of no elements whose shapes claim any size, and
dtypes that NumPy does not have.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError, safe_open

from layerwave.errors import LayerwaveError

DTYPES = frozenset("F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split())
_MOST_AXES = 8


@contextmanager
def open_tensors(path: str | os.PathLike[str], what: str, remedy: str) -> Iterator[safe_open]:
    """The open file; `what` says in messages what it should have been, and `remedy` what to do.

    Raises:
        LayerwaveError: no such file, not a whole safetensors file, or a tensor that cannot be an array. So do errors of
            the library inside the `with` block.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            _check(file, os.path.getsize(path), f"{path}: {what}", remedy)
            yield file
    except (OSError, SafetensorError) as error:
        raise LayerwaveError(f"{path}: {what} ({error}); {remedy}") from error


def _check(file: safe_open, size: int, said: str, remedy: str) -> None:
    for name in file.keys():
        tensor = file.get_slice(name)
        dtype, shape = tensor.get_dtype(), tensor.get_shape()
        if dtype not in DTYPES:
            raise LayerwaveError(
                f"{said} (tensor {name} is {dtype}; supported: {', '.join(sorted(DTYPES))}; quantised tensors are not "
                f"read); {remedy}"
            )
        if len(shape) > _MOST_AXES or math.prod(filter(None, shape)) > size:
            raise LayerwaveError(f"{said} (tensor {name} claims the shape {tuple(shape)[:_MOST_AXES]}); {remedy}")
