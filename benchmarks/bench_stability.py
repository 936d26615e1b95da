"""Times `stability` at the size of a real target, against its replicates searched one by one.

    python benchmarks/bench_stability.py [--layers 36] [--features 256] [--replicates 32]

States are random with the drift and the growing norms of a model. The features are few because the search reads Grams
alone: its time does not depend on them. Prints versions, machine, wall and processor time; asserts nothing.
"""

import argparse
import os
import platform
import time

import jax
import numpy as np

from layerwave.calibration import Calibration, CalibrationSettings
from layerwave.calibration.replicates import Replicates, sample_weights
from layerwave.selection import elsi, elsi_c
from layerwave.selection.stability import stability


def made_calibration(layers: int, block: int, features: int, samples: int, replicates: int) -> Calibration:
    """A calibration of samples with one block each."""
    rng = np.random.default_rng(0)
    growth = np.geomspace(6, 185, layers, dtype=np.float32)[:, None, None]
    clean = np.cumsum(rng.standard_normal((layers, block, features), np.float32), axis=0)
    states = growth * (clean + rng.standard_normal((samples, layers, block, features), np.float32))
    settings = CalibrationSettings(block=block, samples=samples, replicates=replicates)
    fingerprints = np.sort(rng.integers(0, 2**64, samples, dtype=np.uint64))
    weights = sample_weights(fingerprints, replicates, settings.seed).astype(np.float32)
    kept = np.full((4, samples), block)
    return Calibration(
        sums=np.repeat(states.sum(axis=0)[None], 4, axis=0),
        counts=np.full(4, samples),
        curves=np.ones((4, samples, layers), np.float32),
        kept=kept,
        lengths=kept[0],
        sinks=np.zeros(samples, np.int64),
        fingerprints=fingerprints,
        settings=settings,
        target_name="random states",
        target_fingerprint="",
        target_dtype="float32",
        tallies={},
        replicates=Replicates.from_sums(np.tensordot(weights, states, axes=1), limit=1e6),
    )


def timed(name: str, run) -> None:
    wall, processor = time.perf_counter(), time.process_time()
    run()
    print(f"{name:<58} {time.perf_counter() - wall:7.2f} s wall {time.process_time() - processor:7.2f} s processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 36), ("block", 32), ("features", 256), ("samples", 64), ("replicates", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}, {jax.default_backend()}")
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable, load {load}")
    print(vars(options))
    calibration = made_calibration(**vars(options))

    for run in ("first, with compilation", "again"):
        for method in ("elsi", "elsi_c"):
            timed(f"stability {method}, size 3, {run}", lambda method=method: stability(calibration, 3, method))
    parts = [Calibration.from_states(Z) for Z in calibration.replicates.sums[-options.replicates :]]
    for name, method in (("elsi", elsi), ("elsi_c", elsi_c)):
        method(parts[0], 3)
        timed(
            f"{options.replicates} replicates one by one, {name}, compiled",
            lambda method=method: [method(part, 3) for part in parts],
        )


if __name__ == "__main__":
    main()
