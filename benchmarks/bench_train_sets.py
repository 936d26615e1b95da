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

from layerwave.drafts import DraftVocabulary, UnrollSettings
from layerwave.drafts.loader import Batch
from layerwave.drafts.stacks import Optimiser, initial_stacks, observe, train_step, union
from layerwave.targets import Decoder, DecoderConfig, Target, load_target
from layerwave.targets.rope import Rope

HALF_BILLION = DecoderConfig(
    model_type="qwen2",
    num_layers=24,
    hidden_size=896,
    intermediate_size=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=151_936,
    max_positions=32_768,
    norm_eps=1e-6,
    rope=Rope(1e6),
    tie_embeddings=True,
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
)

OPTIMISER = Optimiser(learning_rate=1e-4, warmup_steps=15, steps=1000, clip=0.5, weight_decay=0.0)


def random_target() -> Target:
    decoder = jax.jit(lambda: nnx.split(Decoder(HALF_BILLION, rngs=nnx.Rngs(0))))
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(HALF_BILLION, rngs=nnx.Rngs(0))))
    return Target("half-billion", HALF_BILLION, nnx.merge(graphdef, decoder()[1]), None, "random")


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
                "together / separate": statistics.median(ratios),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
