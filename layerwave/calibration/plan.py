"""How much memory a calibration will take, and whether it is there; from config.json and tensor files' headers alone.

Activations are an estimate of what XLA allocates for one batch; tests hold it to what XLA itself says. Letters as in
step.py; b sequences of T tokens in a share.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from layerwave.calibration.replicates import SHARES
from layerwave.calibration.settings import POOLS, CalibrationSettings
from layerwave.calibration.token_gather import token_sample_bytes
from layerwave.calibration.tokens import SMALLEST_BUCKET
from layerwave.errors import LayerwaveError
from layerwave.targets import DecoderConfig
from layerwave.targets.checkpoint import abstract_parameters, partition
from layerwave.targets.decoder import query_block
from layerwave.targets.mesh import MODEL, shares

SHARE_TOKENS = 2048
"""Tokens of a batch, for each share of `data`, unless they do not fit."""


@dataclass(frozen=True)
class Plan:
    """Bytes that a calibration needs.

    On each device: parameters, activations of a batch of `batch_tokens`, sums of blocks of the pools and of the
    replicates. On the host: both sums twice when they have left the devices, the token sample, and the largest
    parameter on its way to them.
    """

    mesh: str
    devices: int
    batch_tokens: int
    parameters: int
    activations: int
    pools: int
    replicates: int
    sums: int
    token_sample: int
    largest_parameter: int
    device_memory: int | None
    """Free bytes of a device; None where it has none of its own (CPU)."""
    host_memory: int | None
    """Free bytes of the host; None where they are not known."""

    @property
    def device(self) -> int:
        return self.parameters + self.activations + self.pools + self.replicates

    @property
    def host(self) -> int:
        placed = self.largest_parameter if self.device_memory is not None else self.devices * self.device
        return self.sums + self.token_sample + placed

    @property
    def fits(self) -> bool:
        needs = ((self.device, self.device_memory), (self.host, self.host_memory))
        return all(there is None or needed <= there for needed, there in needs)

    def __str__(self) -> str:
        names = ("parameters", "activations", "pools", "replicates")
        parts = ", ".join(f"{name} {_size(getattr(self, name))}" for name in names)
        own = "in the host's memory" if self.device_memory is None else f"of {_size(self.device_memory)} free"
        there = "an unknown amount" if self.host_memory is None else _size(self.host_memory)
        return (
            f"{self.mesh}, {self.batch_tokens:,} tokens a batch: {_size(self.device)} on each device, {own} ({parts}); "
            f"{_size(self.host)} on the host, of {there} free (token sample {_size(self.token_sample)})"
        )


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def plan_calibration(
    config: DecoderConfig,
    dtype: str,
    settings: CalibrationSettings,
    mesh: Mesh | None = None,
    batch_tokens: int | None = None,
) -> Plan:
    """The plan of a calibration, with the largest batch up to `SHARE_TOKENS` for each share that fits.

    Raises:
        LayerwaveError: `batch_tokens` tokens, or without them one sample a share, do not fit; the numbers are named.
    """
    length = min(settings.max_length, config.max_positions)
    asked = [shares(mesh) * SHARE_TOKENS if batch_tokens is None else batch_tokens]
    while batch_tokens is None and asked[-1] > shares(mesh) * length:
        asked.append(asked[-1] // 2)
    device, host = free_memory(mesh)
    plan = _planner(config, dtype, settings, mesh, length, device, host)
    plans = [plan(tokens) for tokens in asked]
    fitting = [found for found in plans if found.fits]
    if not fitting:
        raise LayerwaveError(
            f"the calibration does not fit into memory: {plans[-1]}; pass a smaller --batch-tokens, --max-length, "
            "--replicates or --token-megabytes, a --mesh with more devices on model, or --dtype bfloat16"
        )
    return fitting[0]


def _planner(
    config: DecoderConfig,
    dtype: str,
    settings: CalibrationSettings,
    mesh: Mesh | None,
    length: int,
    device_memory: int | None,
    host_memory: int | None,
) -> Callable[[int], Plan]:
    item, model = jnp.dtype(dtype).itemsize, 1 if mesh is None else mesh.shape[MODEL]
    whole = {p: item * prod(p.whole) for p in abstract_parameters(config)}
    sizes = [
        size // (model if mesh is not None and MODEL in partition(p, config, mesh) else 1) for p, size in whole.items()
    ]
    widened = 2 if item == 2 and device_memory is None else 0  # XLA computes in float32 on the CPU
    accumulator = 4 * config.num_layers * settings.block * _cut(config.hidden_size, model)
    accumulators = len(SHARES) + settings.replicates if settings.replicates else 0
    copies = 1 if shares(mesh) == 1 else 2  # of each share, and in all

    def plan(batch_tokens: int) -> Plan:
        share = batch_tokens // shares(mesh)
        activations = max(
            _activations(config, settings, max(1, share // T), T, item, model)
            for T in (min(SMALLEST_BUCKET, length), length)
        )
        return Plan(
            mesh="one device" if mesh is None else f"mesh data={shares(mesh)},model={model}",
            devices=shares(mesh) * model,
            batch_tokens=batch_tokens,
            parameters=sum(sizes),
            activations=activations + widened * sum(sizes),
            pools=copies * len(POOLS) * accumulator,
            replicates=copies * accumulators * accumulator,
            sums=2 * 4 * (len(POOLS) + accumulators) * config.num_layers * settings.block * config.hidden_size,
            token_sample=token_sample_bytes(config.num_layers, config.hidden_size, settings),
            largest_parameter=max(whole.values()),
            device_memory=device_memory,
            host_memory=host_memory,
        )

    return plan


def _activations(config: DecoderConfig, settings: CalibrationSettings, b: int, T: int, item: int, model: int) -> int:
    """Bytes of one share's batch on one device: states of all layers, and the largest of what lives only for a time."""
    N, D, B, P = config.num_layers, config.hidden_size, settings.block, len(POOLS)
    states = N * b * T * _cut(D, model) * item
    # Blocks of queries see half of all pairs, and XLA may hold the scores of all; exponentials and weights of one.
    scores = 4 * b * (T * T // 2 + 2 * query_block(T) * T) * _cut(config.num_heads, model)
    hidden = 3 * item * b * T * _cut(config.intermediate_size, model)
    # `token_entropy` takes the vocabulary in chunks on a CPU, and positions elsewhere.
    on_cpu = jax.default_backend() == "cpu"
    logits = 2 * 4 * (512 * b * T if on_cpu else min(128, b * T) * _cut(config.vocab_size, model))
    stream = 8 * 4 * b * T * D  # normed, rotated and float32 copies of one layer
    blocks = 2 * 4 * b * P * B * (T + D) + 4 * N * b * P * B * B
    return states + max(stream + max(scores, hidden, logits), blocks)  # the forward pass, and then the blocks


def _cut(size: int, model: int) -> int:
    return size if size % model else size // model


def free_memory(mesh: Mesh | None) -> tuple[int | None, int | None]:
    """Free bytes of the smallest device, None where it has none of its own; and of the host, None if not known."""
    devices = jax.local_devices()[:1] if mesh is None else mesh.devices.flat
    stats = [device.memory_stats() for device in devices]
    free = [found["bytes_limit"] - found["bytes_in_use"] for found in stats if found and "bytes_limit" in found]
    return min(free, default=None), _host_memory()


def _host_memory(root: Path = Path("/")) -> int | None:
    """What Linux says is available, at most what the control group (a container's limit) leaves."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    except OSError:
        return None
    for limit, use, field in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.stat", "anon"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.stat", "rss"),
    ):
        try:
            used = dict(line.split() for line in (root / use).read_text().splitlines())[field]
            free.append(int((root / limit).read_text()) - int(used))
        except (OSError, ValueError, KeyError):  # no such group, or no limit ("max")
            continue
    return min(free, default=None)
