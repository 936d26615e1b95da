"""What this machine offers to layerwave."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("layerwave", "jax", "jaxlib", "flax", "transformers", "optax", "orbax-checkpoint", "numpy", "torch")
# Device files that drivers make: the accelerator is there whether or not JAX can use it.
_ACCELERATORS = {"NVIDIA GPU": "/dev/nvidia[0-9]*", "TPU": "/dev/accel[0-9]*", "AMD GPU": "/dev/kfd"}
_EXTRAS = {"NVIDIA GPU": "layerwave[cuda13] (or cuda12)", "TPU": "layerwave[tpu]", "AMD GPU": "JAX for ROCm"}


@dataclass(frozen=True)
class Examination:
    """Names and findings, ready to print; `warnings` are what the user should act on."""

    versions: Mapping[str, str]
    devices: Mapping[str, str]
    memory: Mapping[str, str]
    warnings: tuple[str, ...]


def examine() -> Examination:
    """Looks at packages, devices and memory; starts JAX's default backend."""
    import jax

    devices = jax.devices()
    return Examination(
        versions={"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        devices={f"device {device.id}": f"{device.platform}: {device.device_kind}" for device in devices},
        memory=_memory(devices),
        warnings=unused_accelerators(devices[0].platform, {name: glob(path) for name, path in _ACCELERATORS.items()}),
    )


def unused_accelerators(platform_in_use: str, found: Mapping[str, list[str]]) -> tuple[str, ...]:
    """A warning for each accelerator that the machine has while JAX computes on the CPU."""
    if platform_in_use != "cpu":
        return ()
    return tuple(
        f"{len(files)} {name} present ({files[0]}) but JAX computes on the CPU: pip install {_EXTRAS[name]}, "
        "and see that JAX_PLATFORMS does not say cpu"
        for name, files in found.items()
        if files
    )


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _memory(devices) -> dict[str, str]:
    page = os.sysconf("SC_PAGE_SIZE")
    memory = {
        "cores": str(usable_cores()),
        "host memory": f"{page * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
    }
    for device in devices:
        if statistics := device.memory_stats():
            memory[f"device {device.id} memory"] = f"{statistics.get('bytes_limit', 0) / 2**30:.1f} GiB"
    return memory
