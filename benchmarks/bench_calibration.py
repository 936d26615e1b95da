"""Calibration of a 0.5B Qwen2 shape beside torch transformers with output_hidden_states=True and the same reduction.

  python benchmarks/bench_calibration.py --torch-python PYTHON [--samples 8] [--length 512] [--batch-tokens 2048]
                                         [--rounds 5] [--layers 24] [--head chunked] [--folder FOLDER]

PYTHON is an interpreter with torch and transformers; this one needs layerwave only. Both sides load one checkpoint of
random weights in float32 and get the same tokens. Each is a process of its own on all cores: it warms up, then the two
take turns, round by round, so that a busy machine slows both. Timed is a whole calibration without the token sample:
hidden states, next-token entropies, filter, sinks, four pools, 35 weighted sums, S_1 of every sample. Before any time
counts, the two must agree on the kept tokens and on the mean states.

Torch's head: `whole`, logits of all positions of a batch as `model(tokens, output_hidden_states=True)` gives them;
`chunked`, 128 positions at a time as layerwave does, which transformers does not offer by itself.

CPU seconds are those of all threads, on which a busy machine weighs less than on tokens/s.

Peak memory is the most that a process had resident, from its start and from the end of its warm-up on. Prints JSON,
medians last. No time is asserted.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from half_billion import CONFIG

RHO, BLOCK, SINK_MULTIPLE, REPLICATES, CHUNK = 0.3, 32, 10.0, 32, 128


def write_checkpoint(folder: Path, layers: int) -> None:
    """A Hugging Face directory with random weights, and a tokenizer for which a word is the number of a token."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    D, I, V, kv = (CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_key_value_heads"))
    kv *= D // CONFIG["num_attention_heads"]
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))

    # The final norm's factor of 4 spreads the entropies: near ties would make the filter a matter of rounding.
    tensors = {"model.embed_tokens.weight": normal(V, D), "model.norm.weight": np.full(D, 4, np.float32)}
    for layer in range(layers):
        sizes = {"self_attn.q_proj": (D, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D)}
        of_layer = {f"{name}.bias": 0.1 * normal(rows) for name, (rows, _) in sizes.items()}
        sizes |= {"self_attn.o_proj": (D, D), "mlp.gate_proj": (I, D), "mlp.up_proj": (I, D), "mlp.down_proj": (D, I)}
        of_layer |= {f"{name}.weight": normal(*shape) for name, shape in sizes.items()}
        of_layer |= {
            f"{name}.weight": np.ones(D, np.float32) for name in ("input_layernorm", "post_attention_layernorm")
        }
        tensors |= {f"model.layers.{layer}.{name}": array for name, array in of_layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    core = Tokenizer(models.WordLevel({str(i): i for i in range(V)}, "0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def tokens_of(round_: int, samples: int, length: int) -> np.ndarray:
    return np.random.default_rng([1, round_]).integers(0, CONFIG["vocab_size"], (samples, length))


class Layerwave:
    """`layerwave.calibrate`, as a user calls it."""

    def __init__(self, args: argparse.Namespace):
        from transformers import PreTrainedTokenizerFast

        import layerwave

        # AutoTokenizer would make a Qwen2Tokenizer of it, which splits numbers into digits.
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.folder / "tokenizer.json"))
        self.target = replace(layerwave.load_target(args.folder), tokenizer=tokenizer)
        self.calibrate, self.args = layerwave.calibrate, args

    def run(self, tokens: np.ndarray) -> dict:
        calibration = self.calibrate(
            self.target,
            [{"text": " ".join(map(str, row))} for row in tokens.tolist()],
            rho=RHO,
            block=BLOCK,
            sink_multiple=SINK_MULTIPLE,
            replicates=REPLICATES,
            final_state="post_norm",
            token_sample=False,
            batch_tokens=self.args.batch_tokens,
        )
        return {"states": calibration.states, "kept": int(calibration.kept[0].sum()), "curves": calibration.curves[0]}


class Torch:
    """transformers and the same sums, written for whole batches."""

    def __init__(self, args: argparse.Namespace):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.args = torch, args
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()

    def entropies(self, logits):
        log_p = self.torch.log_softmax(logits, dim=-1)
        return -(log_p.exp() * log_p).sum(-1)

    def forward(self, tokens):
        """States of all layers (N, b, T, D) and next-token entropies (b, T)."""
        if self.args.head == "whole":
            out = self.model(tokens, output_hidden_states=True, use_cache=False)
            return self.torch.stack(out.hidden_states[1:]), self.entropies(out.logits)
        out = self.model.model(tokens, output_hidden_states=True, use_cache=False)
        normed = out.hidden_states[-1].flatten(0, 1).split(CHUNK)
        entropy = self.torch.cat([self.entropies(self.model.lm_head(chunk)) for chunk in normed])
        return self.torch.stack(out.hidden_states[1:]), entropy.reshape(tokens.shape)

    def run(self, tokens: np.ndarray) -> dict:
        torch = self.torch
        weights = torch.from_numpy(np.random.default_rng(0).poisson(1.0, (3 + REPLICATES, len(tokens)))).float()
        rows = max(1, self.args.batch_tokens // tokens.shape[1])
        pools, replicates, blocks, kept, curves = 0, 0, 0, 0, []
        with torch.inference_mode():
            for start in range(0, len(tokens), rows):
                states, entropy = self.forward(torch.from_numpy(tokens[start : start + rows]))
                keep, P, number = self.blocks_of(states, entropy)
                own = torch.stack([torch.einsum("bpkt,btd->bpkd", P, layer) for layer in states])  # (N, b, P, B, D)
                pools = pools + own.sum(1)
                replicates = replicates + torch.einsum("cb,nbkd->nckd", weights[:, start : start + rows], own[:, :, 0])
                mean = own / number.clamp(min=1)[None, :, :, None, None]
                p = torch.linalg.eigvalsh(mean @ mean.transpose(-1, -2)).clamp(min=0)
                p = p / p.sum(-1, keepdim=True)
                curves.append(-torch.xlogy(p, p).sum(-1)[:, :, 0].T)
                blocks, kept = blocks + number.sum(0), kept + int(keep[:, 0].sum())
        return {"states": (pools[:, 0] / blocks[0]).numpy(), "kept": kept, "curves": torch.cat(curves).numpy()}

    def blocks_of(self, states, entropy):
        """Kept tokens (b, P, T), the matrices that sum them over blocks (b, P, B, T), and numbers of blocks (b, P)."""
        torch = self.torch
        T = entropy.shape[1]
        top = entropy.topk(-int(-RHO * T // 1), dim=1).indices
        filtered = torch.zeros_like(entropy, dtype=torch.bool).scatter(1, top, True)
        norms = torch.stack([layer.norm(dim=-1) for layer in states])
        ascending = norms.sort(dim=-1).values
        median = (ascending[..., (T - 1) // 2] + ascending[..., T // 2]) / 2
        sinks = (norms > SINK_MULTIPLE * median[..., None]).any(0)
        keep = torch.stack([filtered, filtered & ~sinks, torch.ones_like(sinks), ~sinks], dim=1)
        rank, number = keep.cumsum(-1) - 1, keep.sum(-1) // BLOCK
        used = keep & (rank < number[..., None] * BLOCK)
        P = used[:, :, None] & (rank[:, :, None] % BLOCK == torch.arange(BLOCK)[:, None])
        return keep, P.float(), number


def resident() -> dict:
    """Most megabytes resident since the start, and since `forget_peak`."""
    since = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {"start": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "warm": int(since.split()[1]) / 1024}


def serve(args: argparse.Namespace) -> None:
    """A side: answers each round's number on stdin with one line of JSON."""
    side = {"layerwave": Layerwave, "torch": Torch}[args.side](args)
    whole = 0.0
    for line in sys.stdin:
        round_ = int(line)
        tokens = tokens_of(round_, args.samples, args.length)
        started, busy = time.perf_counter(), time.process_time()
        found = side.run(tokens)
        answer = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - busy}
        if round_ == 0:
            whole = resident()["start"]
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
            answer |= {name: np.asarray(value).tolist() for name, value in found.items()}
        peak = resident()["warm"]
        print(json.dumps(answer | {"peak_mb": max(whole, peak), "warm_mb": peak}), flush=True)


def main(args: argparse.Namespace) -> None:
    if not (args.folder / "model.safetensors").is_file():
        subprocess.run([*command(args, sys.executable), "--side", "checkpoint"], check=True)
    sides = {
        side: subprocess.Popen(
            [*command(args, python), "--side", side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for side, python in (("layerwave", sys.executable), ("torch", args.torch_python))
    }

    def ask(side: str, round_: int) -> dict:
        process = sides[side]
        process.stdin.write(f"{round_}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            sys.exit(f"the side {side} ended with {process.wait()}")
        return json.loads(line)

    first = {side: ask(side, 0) for side in sides}
    ours, theirs = (np.array(first[side]["states"]) for side in sides)
    assert first["layerwave"]["kept"] == first["torch"]["kept"], "the sides keep different numbers of tokens"
    apart = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    assert apart < 1e-3, f"the mean states differ by {apart:.2g} of the greatest"
    curves = (np.sort(first[side]["curves"], axis=0) for side in sides)  # layerwave orders samples by fingerprint
    assert np.allclose(*curves, atol=1e-3), "the samples' entropies differ"
    rounds = [{side: ask(side, round_) for side in sides} for round_ in range(1, args.rounds + 1)]
    for process in sides.values():
        process.stdin.close()
        process.wait()
    tokens = args.samples * args.length
    speeds = {side: [tokens / round_[side]["seconds"] for round_ in rounds] for side in sides}
    ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
    last = rounds[-1]
    result = {
        "shape": f"{args.layers} layers, width {CONFIG['hidden_size']}, {args.samples} samples of {args.length} tokens",
        "batch_tokens": args.batch_tokens,
        "torch head": args.head,
        "states apart": apart,
        "tokens/s": {side: [round(speed) for speed in found] for side, found in speeds.items()},
        "speed ratios": [round(ratio, 3) for ratio in ratios],
        "median tokens/s": {side: round(statistics.median(found)) for side, found in speeds.items()},
        "median speed ratio": round(statistics.median(ratios), 3),
        "CPU seconds": {side: [round(round_[side]["cpu"], 1) for round_ in rounds] for side in sides},
        "peak MB": {side: round(last[side]["peak_mb"]) for side in sides},
        "peak ratio": round(last["layerwave"]["peak_mb"] / last["torch"]["peak_mb"], 3),
        "peak MB after the warm-up": {side: round(last[side]["warm_mb"]) for side in sides},
        "peak ratio after the warm-up": round(last["layerwave"]["warm_mb"] / last["torch"]["warm_mb"], 3),
    }
    print(json.dumps(result, indent=1))


def command(args: argparse.Namespace, python: str) -> list[str]:
    options = ("samples", "length", "layers", "batch_tokens", "head", "folder")
    return [python, __file__, *(f"--{name.replace('_', '-')}={getattr(args, name)}" for name in options)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", help="interpreter that has torch and transformers")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--head", choices=("whole", "chunked"), default="whole")
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoint (2 GB) is kept; else temporary")
    parser.add_argument("--side", choices=("layerwave", "torch", "checkpoint"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = arguments()
    if parsed.side == "checkpoint":
        write_checkpoint(parsed.folder, parsed.layers)
    elif parsed.side is not None:
        serve(parsed)
    elif parsed.folder is not None:
        parsed.folder.mkdir(parents=True, exist_ok=True)
        main(parsed)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            parsed.folder = Path(temporary)
            main(parsed)
