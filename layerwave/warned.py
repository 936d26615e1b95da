"""Warnings: said on the log at once, and kept by whoever makes an artifact meanwhile, so that none is only said."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

logger = logging.getLogger("layerwave")

_kept: ContextVar[tuple[list[str], ...]] = ContextVar("kept", default=())


def warn(message: str) -> None:
    """Says it, and notes it in all artifacts that are being made."""
    logger.warning("%s", message)
    note(message)


def note(message: str) -> None:
    """Only the second: what was said before holds for this artifact too."""
    for kept in _kept.get():
        if message not in kept:
            kept.append(message)


@contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """Gives a list that fills with the warnings of what is done within."""
    kept: list[str] = []
    token = _kept.set((*_kept.get(), kept))
    try:
        yield kept
    finally:
        _kept.reset(token)
