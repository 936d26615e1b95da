"""How far a call raises the memory that this process has resident."""

from collections.abc import Callable
from pathlib import Path

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_growth(run: Callable[[], object]) -> float | None:
    """Megabytes by which the peak during `run` lies above what was resident before; None where Linux is not there."""
    try:
        _FORGET.write_text("5")  # the peak so far
        before = _megabytes("VmRSS")
        run()
        return _megabytes("VmHWM") - before
    except OSError:
        return None


def _megabytes(name: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
