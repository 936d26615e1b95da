"""Files are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerwave.errors import LayerwaveError


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a path to write to, beside `path` and with its suffix, and moves it there when all went well.

    Raises `LayerwaveError` when the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise LayerwaveError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that exists and is writable"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
