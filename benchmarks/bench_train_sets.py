"""Time of one training step of many layer sets on one target pass, against the same sets in separate runs.

  python benchmarks/bench_train_sets.py [--target half-billion|mini] [--sets 8] [--ttt-steps 2] [--draft-vocab 4096]

`half-billion` has the shape of Qwen2.5-0.5B with random weights. Both sides run the very code of `layerwave train`;
compilation is apart, and the sides take turns, so that a busy machine slows both. Prints JSON, medians last.
"""

import argparse
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from half_billion import random_target

from layerwave.drafts import DraftVocabulary, UnrollSettings
from layerwave.drafts.loader import Batch
from layerwave.drafts.stacks import Optimiser, initial_stacks, observe, train_step, union
from layerwave.targets import Target, load_target

OPTIMISER = Optimiser(learning_rate=1e-4, warmup_steps=15, steps=1000, clip=0.5, weight_decay=0.0)


class Runs:
    """One training run: call it for a step, which returns its seconds."""

    def __init__(self, target: Target, layer_sets, vocabulary: DraftVocabulary, settings: UnrollSettings, batch: Batch):
        self.stacks, self.states, _ = initial_stacks(target, layer_sets, vocabulary, OPTIMISER)
        self.settings, self.batch, self.layers = settings, batch, jnp.array(union(layer_sets))
        self.target, self.vocabulary = nnx.split(target.decoder), jnp.asarray(vocabulary.tokens)

    def __call__(self) -> float:
        start = time.perf_counter()
        self.states, reports = train_step(
            *self.target,
            self.stacks,
            self.states,
            self.batch,
            None,
            self.layers,
            self.vocabulary,
            self.settings,
            OPTIMISER,
        )
        jax.block_until_ready(reports)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("half-billion", "mini"), default="half-billion")
    parser.add_argument("--sets", type=int, default=8)
    parser.add_argument("--ttt-steps", type=int, default=2)
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    target = random_target() if args.target == "half-billion" else load_target("mini")
    count, size = target.config.num_layers, target.config.vocab_size
    rng = np.random.default_rng(0)
    layer_sets: list[tuple[int, ...]] = []
    while len(layer_sets) < args.sets:
        drawn = tuple(sorted(rng.choice(count, 3, replace=False).tolist()))
        layer_sets += [drawn] * (drawn not in layer_sets)
    shape = (args.rows, args.length)
    batch = Batch(
        rng.integers(0, size, shape).astype(np.int32),
        np.ones(shape, bool),
        np.broadcast_to(np.arange(args.length, dtype=np.int32), shape),
        np.zeros(shape, np.int32),
    )
    vocabulary = DraftVocabulary(np.arange(args.draft_vocab, dtype=np.int32), size)
    settings = UnrollSettings(steps=args.ttt_steps)
    graphdef, params = nnx.split(target.decoder)

    def target_pass() -> float:
        start = time.perf_counter()
        jax.block_until_ready(observe(graphdef, params, batch, jnp.array([0, 1, 2])))
        return time.perf_counter() - start

    together = Runs(target, layer_sets, vocabulary, settings, batch)
    seconds: dict[str, list[float]] = {"target pass": [], "together": [], "separate": []}
    for repeat in range(args.repeats + 1):  # the first compiles
        found = {"target pass": target_pass(), "together": together(), "separate": 0.0}
        for layers in layer_sets:  # one after the other: eight states of moments at once would not fit everywhere
            alone = Runs(target, [layers], vocabulary, settings, batch)
            if repeat == 0 and layers == layer_sets[0]:
                alone()
            found["separate"] += alone()
        if repeat:
            for name, value in found.items():
                seconds[name].append(value)
        print(json.dumps({"repeat": repeat, "compiling": repeat == 0, **found}), flush=True)
    medians = {f"{name}, s": statistics.median(values) for name, values in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["together"], seconds["separate"], strict=True)]
    print(
        json.dumps(
            {
                **vars(args),
                "tokens": args.rows * args.length,
                "device": jax.devices()[0].device_kind,
                "cpus": os.cpu_count(),
                "load": os.getloadavg()[0],
                **medians,
                "ratios": ratios,
                "together / separate": statistics.median(ratios),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
