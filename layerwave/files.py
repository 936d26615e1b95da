"""Files are written whole or not at all."""

import os
import shutil
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


@contextmanager
def whole_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a new directory to fill, beside `path`, and moves it there when all went well.

    A directory that is there is replaced if it holds nothing but files of the same names as the new one.

    Raises `LayerwaveError` when it holds anything else, or cannot be written.
    """
    path = Path(os.path.abspath(path))
    partial, old = (path.with_name(f".{os.getpid()}.{kind}.{path.name}") for kind in ("new", "old"))
    try:
        partial.mkdir()
        yield partial
        if path.exists():
            foreign = sorted({item.name for item in path.iterdir()} - {item.name for item in partial.iterdir()})
            if foreign:
                raise LayerwaveError(
                    f"{path} holds other files ({', '.join(foreign[:3])}), which would be lost: name a new directory"
                )
            os.replace(path, old)
        os.replace(partial, path)
    except OSError as error:
        raise LayerwaveError(
            f"{path} cannot be written ({error.strerror}); name a directory in a folder that exists and is writable"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
