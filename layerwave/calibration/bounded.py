"""A bound in time and memory for programs that come with a model: its chat template.

Jinja's sandbox keeps a template from Python and from files, but not from looping, or from doubling a string, for as
long as it likes. Python code in a thread can be stopped from outside between two of its operations, and that is done
here. A single operation is not stopped: one that asks for more memory than there is ends in a `MemoryError`.
"""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layerwave.errors import LayerwaveError

SECONDS, MEGABYTES = 20.0, 2048.0
"""Processor time of the thread, and growth of the process, between beginning and end."""
_POLL_SECONDS = 0.02


class _Stopped(BaseException):
    """Put into the thread; not an Exception, so that nothing on the way takes it for one of its own."""


@dataclass
class _Watched:
    thread: int
    began: float = 0.0
    resident: float = 0.0
    exceeded: str = ""


_LOCK, _SOME = threading.Lock(), threading.Event()
_WATCHED: dict[int, _Watched] = {}


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Stops the block when it takes too long or too much memory.

    Raises:
        LayerwaveError: it did; `what` names it.
    """
    watched = _Watched(threading.get_ident())
    watched.began = _processor_seconds(watched.thread)
    _watcher()
    try:
        with _LOCK:
            _WATCHED[id(watched)] = watched
        _SOME.set()
        try:
            yield
        finally:
            with _LOCK:
                _WATCHED.pop(id(watched), None)
                if watched.exceeded:
                    _throw(watched.thread, None)  # not after the block
    except _Stopped:
        raise LayerwaveError(
            f"{what} takes {watched.exceeded}, and was stopped: it is a program that came with the model; replace it, "
            "or use another model"
        ) from None


def _watcher() -> None:
    """Starts the one thread that watches, unless it runs."""
    with _LOCK:
        if not any(thread.name == _watch.__qualname__ for thread in threading.enumerate()):
            threading.Thread(target=_watch, name=_watch.__qualname__, daemon=True).start()


def _watch() -> None:
    while True:
        if not _WATCHED:
            _SOME.clear()
            _SOME.wait(timeout=1.0)
        with _LOCK:
            for watched in _WATCHED.values():
                if not watched.exceeded and (exceeded := _exceeded(watched)):
                    watched.exceeded = exceeded
                    _throw(watched.thread, _Stopped)
        time.sleep(_POLL_SECONDS)


def _exceeded(watched: _Watched) -> str:
    resident = _resident_megabytes()
    watched.resident = watched.resident or resident
    if _processor_seconds(watched.thread) - watched.began > SECONDS:
        return f"more than {SECONDS:g} seconds"
    if resident - watched.resident > MEGABYTES:
        return f"more than {MEGABYTES:g} megabytes"
    return ""


def _throw(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))


def _processor_seconds(thread: int) -> float:
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _resident_megabytes() -> float:
    """Of this process; 0 where the system does not say, and then memory is not bounded."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 / 1e6 if statm.exists() else 0.0
