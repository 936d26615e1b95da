"""SIGTERM ends a command as Ctrl-C does: with one line, the exit code of the signal, and nothing half-written."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


class Interrupted(KeyboardInterrupt):
    """Raised wherever the program is when SIGINT or SIGTERM comes."""


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Within it SIGINT and SIGTERM raise `Interrupted`; a second one ends the process at once."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():  # only the main thread hears of signals
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        _listen()
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen() -> None:
    for number in _SIGNALS:
        signal.signal(number, _raise)


@contextmanager
def deaf() -> Iterator[None]:
    """For long waits in which Python does not get to hear of signals: within it they end the process at once.

    Afterwards they are heard again, also where a library took them meanwhile, as JAX's service for many processes does.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        _listen()


def received() -> int | None:
    """The signal that came. What it raised may be wrapped on its way, as XLA does with a callback's errors."""
    return _received[0] if _received else None


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(signal.Signals(number).name)
