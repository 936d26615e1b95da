"""Two runs must not write one output: the first holds a lock beside it, which names its owner.

The lock is the operating system's (`flock`), so that it falls with the process that holds it, however that ends. What
the file says is for people, and for other machines, whose locks a shared folder may not pass on: the lock of another
machine is never taken over.
"""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from layerwave.errors import LayerwaveError
from layerwave.files.writing import cannot_write, sweep

_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
"""Of file systems without locks, where the owner's process is looked for."""


@contextmanager
def only_run(out: str | os.PathLike[str], *others: Path) -> Iterator[None]:
    """Holds the lock of an output (`OUT.lock`); removes what killed runs left half-written of it and of `others`.

    Raises `LayerwaveError` when another run holds it (process, machine and time are named), or when there can be none.
    """
    out = Path(os.path.abspath(out))
    path = out.with_name(f"{out.name}.lock")
    try:
        file = _locked(path, out)
        try:
            os.ftruncate(file, 0)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
            os.pwrite(file, json.dumps(owner).encode(), 0)
            for written in (out, *others):
                sweep(written)
        except BaseException:
            _release(file, path)
            raise
    except OSError as error:
        raise cannot_write(out, error, "name an output in a folder that exists and is writable") from None
    try:
        yield
    finally:
        _release(file, path)


def _release(file: int, path: Path) -> None:
    path.unlink(missing_ok=True)  # while it is held: who waits for it will see that it is not the file of that name
    os.close(file)


def _locked(path: Path, out: Path) -> int:
    """The open file of a lock that is ours."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            owner = _owner(file)
            held = _held(file, owner)
            if held or owner.get("host", socket.gethostname()) != socket.gethostname():
                raise _refusal(owner, held, path, out)
            if path.exists() and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its owner removed it in this moment


def _held(file: int, owner: dict[str, Any]) -> bool:
    """Whether another process holds the lock; otherwise it is ours now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return owner.get("host") == socket.gethostname() and _lives(owner.get("pid"))
    return False


def _lives(pid: Any) -> bool:
    try:
        os.kill(pid, 0)
    except (TypeError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def _owner(file: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:  # its owner was killed, or is about to write it
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(owner: dict[str, Any], held: bool, path: Path, out: Path) -> LayerwaveError:
    who = "another process"
    if owner:
        who = f"process {owner.get('pid')} on {owner.get('host')} since {owner.get('since')}"
    if held:
        return LayerwaveError(f"{out} is being written by {who}: wait for it, stop it, or give another --out")
    return LayerwaveError(f"{out} was being written by {who}: if that process is gone, remove {path}")
