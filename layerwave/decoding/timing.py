"""Wall-clock time of work that JAX compiles when it first meets a shape."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """The result and the seconds. Work in which something was compiled is done again, and that time is taken."""
    with _compilations() as seen:
        result, seconds = _once(work)
    return _once(work) if seen else (result, seconds)


def _once(work: Callable[[], Result]) -> tuple[Result, float]:
    started = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - started


@contextmanager
def _compilations() -> Iterator[list[float]]:
    """Seconds of each compilation within."""
    seen: list[float] = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
