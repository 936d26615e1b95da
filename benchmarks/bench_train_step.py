"""One draft's training step, against the same step in plain torch in the same process.

  python benchmarks/bench_train_step.py [--shape mini|half-billion] [--rows 1] [--length 256] [--rounds 7]

Both sides get equal weights and inputs: states and targets are given, the target model takes no part. A step is the
training-time test with all its steps, the loss, its gradient, the clip and AdamW, on all cores that this process may
use. First both sides train for a few steps and must report the same losses; then they take turns, so that a busy
machine slows both. Needs torch, which layerwave itself does not. Prints JSON, medians last; asserts losses, no times.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from layerwave.drafts import Draft, DraftConfig, DraftVocabulary, Eagle3, UnrollSettings, unroll
from layerwave.drafts.checkpoint import draft_tensors
from layerwave.drafts.loader import Batch
from layerwave.drafts.stacks import Optimiser, StackState
from layerwave.drafts.unroll import Supervision
from layerwave.targets.rope import Rope

SHAPES = {
    "mini": dict(
        hidden_size=128, intermediate_size=384, num_heads=4, num_kv_heads=2, head_dim=32, draft_vocab_size=2048
    ),
    "half-billion": dict(
        hidden_size=896, intermediate_size=4864, num_heads=14, num_kv_heads=2, head_dim=64, draft_vocab_size=4096
    ),
}
THETA, EPS = 10_000.0, 1e-6
OPTIMISER = Optimiser(learning_rate=1e-3, warmup_steps=2, steps=1000, clip=0.5, weight_decay=0.0)


def config_of(shape: str) -> DraftConfig:
    sizes = SHAPES[shape]
    return DraftConfig(
        layers=(2, 6, 9),
        num_target_layers=12,
        target_hidden_size=sizes["hidden_size"],
        vocab_size=2 * sizes["draft_vocab_size"],
        max_positions=4096,
        norm_eps=EPS,
        rope=Rope(THETA),
        **sizes,
    )


class Inputs:
    """Random, the same numpy arrays for both sides: rows of one document, half of whose tokens are to be predicted."""

    def __init__(self, config: DraftConfig, rows: int, length: int):
        rng = np.random.default_rng(0)
        shape, size, drafted = (rows, length), config.vocab_size, config.draft_vocab_size
        self.vocabulary = np.sort(rng.choice(size, drafted, replace=False)).astype(np.int32)
        self.tokens = rng.integers(0, size, shape).astype(np.int32)
        self.loss_mask = rng.random(shape) < 0.5
        self.best = rng.integers(0, size, shape).astype(np.int32)
        logits = 3 * rng.standard_normal((*shape, drafted), np.float32)
        self.probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        self.states = rng.standard_normal((len(config.layers), *shape, config.target_hidden_size), np.float32)
        self.embedding = rng.standard_normal((size, config.hidden_size), np.float32)


class Layerwave:
    """What the trainer does to one draft once the target's pass is there. A call is a step; it returns the loss."""

    def __init__(self, draft: Draft, inputs: Inputs, settings: UnrollSettings):
        self.graphdef, params = nnx.split(draft.module)
        params = jax.tree.map(jnp.copy, params)  # a step donates its state
        self.state = StackState(params, OPTIMISER.transformation.init(params))
        self.settings, shape = settings, inputs.tokens.shape
        places, row = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape), np.zeros(shape, np.int32)
        batch = Batch(inputs.tokens, inputs.loss_mask, places, row)
        supervision = Supervision(inputs.probabilities, np.ones(shape, np.float32), inputs.best)
        slots = np.arange(len(draft.config.layers), dtype=np.int32)
        self.given = jax.device_put((slots, batch, inputs.states, supervision, inputs.embedding, inputs.vocabulary))

    def __call__(self) -> float:
        self.state, loss, _ = layerwave_step(self.graphdef, self.state, self.given, self.settings)
        return float(loss)


@partial(jax.jit, static_argnames=("graphdef", "settings"), donate_argnames="state")
def layerwave_step(graphdef: nnx.GraphDef, state: StackState, given, settings: UnrollSettings):
    loss_of = jax.value_and_grad(unroll, argnums=1, has_aux=True)
    (loss, sums), grads = loss_of(graphdef, state.params, *given, settings)
    return OPTIMISER.update(grads, state), loss, sums


class TorchDraft(torch.nn.Module):
    """The draft by the names of its checkpoints; the attention of later steps adds one score a step (SpecForge)."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        d, heads = config.hidden_size, (config.num_heads, config.num_kv_heads, config.head_dim)
        (self.heads, self.kv_heads, self.head_dim), inner = heads, config.intermediate_size

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=False)

        def norm() -> torch.nn.RMSNorm:
            return torch.nn.RMSNorm(d, eps=EPS)

        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.fc = linear(len(config.layers) * config.target_hidden_size, d)
        self.midlayer = torch.nn.ModuleDict(
            {
                "hidden_norm": norm(),
                "input_layernorm": norm(),
                "post_attention_layernorm": norm(),
                "self_attn": torch.nn.ModuleDict(
                    {
                        "q_proj": linear(2 * d, queries),
                        "k_proj": linear(2 * d, keys),
                        "v_proj": linear(2 * d, keys),
                        "o_proj": linear(queries, d),
                    }
                ),
                "mlp": torch.nn.ModuleDict(
                    {"gate_proj": linear(d, inner), "up_proj": linear(d, inner), "down_proj": linear(inner, d)}
                ),
            }
        )
        self.norm = norm()
        self.lm_head = linear(d, config.draft_vocab_size)
        frequency = THETA ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.register_buffer("frequency", frequency.repeat(2), persistent=False)

    def rotate(self, x, positions):
        angle = positions[:, None] * self.frequency
        first, second = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()

    def attention(self, x, positions, mask, keys, values):
        """`keys`, `values`: of the steps before, to which this step's are added."""
        part, (batch, length, _) = self.midlayer["self_attn"], x.shape
        q, k, v = (
            part[name](x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        keys.append(k), values.append(v)
        q = q.unflatten(1, (self.kv_heads, -1))  # b K G T head_dim
        verified = (q.flatten(2, 3) @ keys[0].mT).unflatten(2, (-1, length))
        own = [(q * k[:, :, None]).sum(-1, keepdim=True) for k in keys[1:]]
        scores = torch.cat([verified / self.head_dim**0.5 + mask, *(o / self.head_dim**0.5 for o in own)], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        mixed = (weights[..., :length].flatten(2, 3) @ values[0]).unflatten(2, (-1, length))
        for i, v in enumerate(values[1:]):
            mixed = mixed + weights[..., length + i, None] * v[:, :, None]
        return part["o_proj"](mixed.flatten(1, 2).transpose(1, 2).flatten(2))

    def forward(self, embedded, features, positions, mask, keys, values):
        part, mlp = self.midlayer, self.midlayer["mlp"]
        x = torch.cat([part["input_layernorm"](embedded), part["hidden_norm"](features)], dim=-1)
        out = features + self.attention(x, positions, mask, keys, values)
        x = part["post_attention_layernorm"](out)
        return out + mlp["down_proj"](torch.nn.functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))


class PlainTorch:
    """The same step in eager torch with autograd, which keeps all activations."""

    def __init__(self, draft: Draft, inputs: Inputs, settings: UnrollSettings):
        self.module, self.settings = TorchDraft(draft.config), settings
        names = self.module.state_dict()
        weights = {name: torch.tensor(x) for name, x in draft_tensors(draft, "float32").items() if name in names}
        self.module.load_state_dict(weights)
        self.optimiser = torch.optim.AdamW(
            self.module.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, foreach=True
        )
        rates = [float(OPTIMISER.schedule(step)) for step in range(OPTIMISER.steps)]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, rates.__getitem__)
        length = inputs.tokens.shape[1]
        self.mask = torch.full((length, length), float("-inf")).triu(1)
        self.states, self.embedding = torch.tensor(inputs.states), torch.tensor(inputs.embedding)
        self.tokens, best = torch.tensor(inputs.tokens), torch.tensor(inputs.best)
        self.targets, self.loss_mask = torch.tensor(inputs.probabilities), torch.tensor(inputs.loss_mask)
        t2d = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
        t2d[torch.tensor(inputs.vocabulary)] = True
        self.learnable, self.best = t2d[best], best
        self.vocabulary = torch.tensor(inputs.vocabulary)

    def __call__(self) -> float:
        steps, length = self.settings.steps, self.tokens.shape[1]
        ahead = partial(shifted, length=length)
        features = self.module.fc(torch.cat(list(self.states), dim=-1))
        positions, keys, values, loss, correct = torch.arange(length), [], [], 0.0, []
        for j in range(steps):
            embedded = self.embedding[ahead(self.tokens, 1 + j)]
            features = self.module(embedded, features, positions + j, self.mask, keys, values)
            log_q = torch.log_softmax(self.module.lm_head(self.module.norm(features)), dim=-1)
            asked = ahead(self.loss_mask, 2 + j)
            trained = asked & ahead(self.learnable, 1 + j)
            entropy = -(ahead(self.targets, 1 + j) * log_q).sum(-1)
            loss = loss + self.settings.decay**j * (entropy * trained).sum() / trained.sum().clamp(min=1)
            with torch.no_grad():
                hit = self.vocabulary[log_q.argmax(-1)] == ahead(self.best, 1 + j)
                correct.append((hit & asked).sum() / asked.sum())
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), OPTIMISER.clip)
        self.optimiser.step()
        self.schedule.step()
        return loss.item()


def shifted(x: torch.Tensor, distance: int, length: int) -> torch.Tensor:
    """What stands `distance` tokens later in each row, zeros beyond its end."""
    later = x[:, distance:]
    return torch.cat([later, later.new_zeros(x.shape[0], length - later.shape[1], *x.shape[2:])], dim=1)


def timed(step) -> tuple[float, float]:
    """Wall and processor seconds of one step."""
    wall, processor = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="mini")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    threads = len(os.sched_getaffinity(0))  # XLA uses as many
    torch.set_num_threads(threads)
    config = config_of(args.shape)
    inputs = Inputs(config, args.rows, args.length)
    vocabulary = DraftVocabulary(inputs.vocabulary, config.vocab_size)
    draft = Draft(config, Eagle3(config, rngs=nnx.Rngs(0)), vocabulary, "", "random")
    sides = {
        "layerwave": Layerwave(draft, inputs, UnrollSettings(steps=args.ttt_steps)),
        "layerwave, no remat": Layerwave(draft, inputs, UnrollSettings(steps=args.ttt_steps, remat=False)),
        "torch": PlainTorch(draft, inputs, UnrollSettings(steps=args.ttt_steps)),
    }
    losses = {name: [side() for _ in range(4)] for name, side in sides.items()}
    print(json.dumps({"losses": losses}), flush=True)
    for found in losses.values():
        np.testing.assert_allclose(found, losses["torch"], rtol=1e-3)

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            seconds[name].append(timed(side))
        print(json.dumps({name: [round(x, 4) for x in found[-1]] for name, found in seconds.items()}), flush=True)
    wall, processor = ({name: [x[i] for x in found] for name, found in seconds.items()} for i in (0, 1))

    def speedup(found: dict[str, list[float]], name: str) -> float:
        return statistics.median(t / own for t, own in zip(found["torch"], found[name], strict=True))

    tokens = args.rows * args.length
    report = {
        **vars(args),
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
        "threads": threads,
        "load": os.getloadavg()[0],
        "tokens/s": {name: tokens / statistics.median(found) for name, found in wall.items()},
        "times torch's tokens/s": {name: speedup(wall, name) for name in sides},
        "the same by processor time": {name: speedup(processor, name) for name in sides},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
