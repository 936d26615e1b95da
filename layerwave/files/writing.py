"""Files are written whole or not at all: beside their place, to the disk, then moved there at one moment.

What a killed process leaves of this are hidden files `.layerwave-PID-NAME`, which the next run of the same output
removes (`sweep`). Only logs grow in place, line by line (`Lines`).
"""

import ctypes
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import save

from layerwave.errors import LayerwaveError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PARTIAL = re.compile(r"\.layerwave-\d+-(.+)")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a path to write to, beside `path` and with its suffix, and moves it there when all went well.

    Raises `LayerwaveError` when the file cannot be written; one that was there is then as it was.
    """
    path = Path(path)
    partial = _partial(path)
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error, "name a file in a folder that exists and is writable") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def whole_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a new directory to fill, beside `path`, and moves it there when all went well.

    A directory that is there is replaced if it holds nothing but files of the same names as the new one.

    Raises `LayerwaveError` when it holds anything else, or cannot be written.
    """
    path = Path(os.path.abspath(path))
    partial = _partial(path)
    try:
        partial.mkdir()
        yield partial
        for item in (*partial.iterdir(), partial):
            sync(item)
        if path.exists():
            foreign = sorted({item.name for item in path.iterdir()} - {item.name for item in partial.iterdir()})
            if foreign:
                raise LayerwaveError(
                    f"{path} holds other files ({', '.join(foreign[:3])}), which would be lost: name a new directory"
                )
            _exchange(partial, path)
        else:
            os.replace(partial, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error, "name a directory in a folder that exists and is writable") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all. Raises `LayerwaveError` as `whole_file` does."""
    with whole_file(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file whose bytes follow from its contents: safetensors itself shuffles the metadata."""
    content = memoryview(save(dict(tensors), dict(metadata)))
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:end]))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text, content[end:]):
            file.write(part)


class Lines:
    """A log that grows by whole lines. Raises `LayerwaveError` where it cannot, and then leaves nothing of the line."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise cannot_write(path, error, "name a folder that exists and is writable") from None

    def append(self, line: str) -> None:
        size = os.fstat(self.file).st_size
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:
                rest = rest[os.write(self.file, rest) :]
        except BaseException as error:  # a line that is cut would be continued by the next
            os.ftruncate(self.file, size)
            if isinstance(error, OSError):
                raise cannot_write(self.path, error, "mend the disk") from None
            raise

    def sync(self) -> None:
        """Waits until all lines are on disk."""
        try:
            os.fsync(self.file)
        except OSError as error:
            raise cannot_write(self.path, error, "mend the disk") from None

    def close(self) -> None:
        os.close(self.file)


def make_folder(path: Path) -> None:
    """A folder and those above it. Raises `LayerwaveError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LayerwaveError(f"{path} cannot be made a folder ({error.strerror}); give another --out") from None


def sweep(out: Path) -> None:
    """Removes what killed writers of `out`, and of files in it, left half-written.

    Only for who knows that no other process writes them now.
    """
    beside = [path for path in out.parent.iterdir() if _of(path) == out.name]
    inside = [path for path in out.rglob(".*") if _of(path)] if out.is_dir() else []
    for path in beside + inside:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        # Some network file systems keep no directories to write; a file has to be written everywhere.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(file)


def cannot_write(path: Path, error: Exception, remedy: str) -> LayerwaveError:
    """What to raise for an error of the system: it says why, and what to do about it."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
    told = re.search(r"os error (\d+)", str(error), re.IGNORECASE)  # safetensors and TensorStore say it in words
    if getattr(error, "errno", int(told[1]) if told else None) in _FULL:
        remedy = "make room, then run the same command again; what was there is as it was"
    return LayerwaveError(f"{path} cannot be written ({reason}): {remedy}")


def _partial(path: Path) -> Path:
    return path.with_name(f".layerwave-{os.getpid()}-{path.name}")


def _of(path: Path) -> str:
    """The name of what a partial file or directory was to become; nothing for other paths."""
    found = _PARTIAL.fullmatch(path.name)
    return found.group(1) if found else ""


def _exchange(new: Path, old: Path) -> None:
    """Lets two directories change places: at one moment on Linux, elsewhere in three."""
    if sys.platform == "linux":
        rename = getattr(ctypes.CDLL(None), "renameat2", None)
        if rename and not rename(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE):
            return
    aside = new.with_name(f"{new.name}.old")
    os.replace(old, aside)
    os.replace(new, old)
    os.replace(aside, new)
