"""What a round of speculative decoding costs, and plain decoding beside torch.

  python benchmarks/bench_decoding.py [--parts scripted plain bucket] [--new 48] [--rounds 5]

`scripted`: a target of the shape of Qwen2.5-0.5B with random weights and a draft of its width, which does all the work
of a real one but is told what to propose: the target's own next token, except at every fourth place, where it is wrong.
So τ follows from the chain alone, and what is measured is the engine. `plain`: greedy decoding of the bundled target
beside `transformers.generate` on the same checkpoint (needs torch). `bucket`: seconds of a round when the cache is
half full and when it is nearly full. Sides take turns, so that a busy machine slows both. Prints JSON, medians.
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
from flax import nnx
from half_billion import random_target

from layerwave.decoding import GenerationSettings, TreeSettings, decode
from layerwave.drafts import Draft, DraftVocabulary, Eagle3, initial_draft
from layerwave.targets import load_target
from layerwave.targets.target import MINI_FOLDER

CHAINS = [TreeSettings(nodes=depth + 1, depth=depth, top_k=1) for depth in (1, 2, 3, 5)]
TREES = [TreeSettings(nodes=60)]
WRONG_EVERY = 4
PARTS = ["scripted", "plain", "bucket"]
KEY = jax.random.key(0)


class Scripted(Eagle3):
    """Its logits follow a script of draft ids by position (-1: leave them as they are). The block's output carries the
    position in its first feature."""

    script: nnx.Variable

    def block(self, embedded, features, positions, attention):
        out, kept = super().block(embedded, features, positions, attention)
        return out.at[..., 0].set(positions.astype(out.dtype)), kept

    def logits(self, out):
        logits = super().logits(out)
        told = self.script[...][out[..., 0].astype(jnp.int32) + 2]
        return jnp.where(told[..., None] == jnp.arange(logits.shape[-1])[None, None], 1e4, logits)


def scripted(draft: Draft, answer: list[int]) -> Draft:
    """The draft with a script for the text `answer`, prompt included."""
    ids = {token: place for place, token in enumerate(draft.vocabulary.tokens.tolist())}
    script = [-1 if place % WRONG_EVERY == 0 else ids[token] for place, token in enumerate(answer)]
    module = nnx.clone(draft.module)
    module.__class__ = Scripted
    module.script = nnx.Variable(jnp.array(script + [-1] * 64, jnp.int32))
    return Draft(draft.config, module, draft.vocabulary, draft.target_fingerprint, draft.target_name)


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def medians(sides: dict, rounds: int) -> dict[str, float]:
    """Median seconds of each side, the sides taking turns; compiled before."""
    for work in sides.values():
        work()
    taken = [{name: seconds(work) for name, work in sides.items()} for _ in range(rounds)]
    return {name: statistics.median(turn[name] for turn in taken) for name in sides}


def bench_scripted(new: int, rounds: int) -> dict:
    target = random_target()
    settings, prompt = GenerationSettings(max_new_tokens=new), list(range(100, 116))
    plain = decode(target.decoder, [prompt], settings, KEY)[0]
    rest = np.setdiff1d(np.arange(4096), plain.tokens)[: 4096 - len(set(plain.tokens))]
    vocabulary = DraftVocabulary(np.sort(np.r_[np.unique(plain.tokens), rest]), target.config.vocab_size)
    draft = scripted(initial_draft(target, (2, 12, 21), vocabulary, KEY), [*prompt, *plain.tokens])

    def run(tree=None, settings=settings):
        return decode(target.decoder, [prompt], settings, KEY, *(() if tree is None else (draft, tree)))[0]

    trees = {f"{tree.nodes} nodes, top_k {tree.top_k}": tree for tree in (*CHAINS, *TREES)}
    found = {name: run(tree) for name, tree in trees.items()}
    assert all(answer.tokens == plain.tokens for answer in found.values()), "an answer differs from plain decoding's"
    # τ does not count the prompt's pass and the token that it makes, so its time is taken off.
    sides = {"prompt": partial(run, settings=GenerationSettings(max_new_tokens=1)), "plain": run}
    taken = medians(sides | {name: partial(run, tree) for name, tree in trees.items()}, rounds)
    alone = taken.pop("prompt")
    result = {"plain, tokens/s": plain.emitted / (taken["plain"] - alone)}
    for name, answer in found.items():
        tau, speedup = answer.emitted / answer.rounds, (taken["plain"] - alone) / (taken[name] - alone)
        result[name] = {"tau": tau, "speed-up": speedup, "speed-up / tau": speedup / tau}
    return result


def bench_plain(new: int, rounds: int) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    target = load_target("mini")
    model = AutoModelForCausalLM.from_pretrained(MINI_FOLDER, dtype=torch.float32).eval()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    result = {}
    for batch in (1, 8):
        prompts = np.random.default_rng(0).integers(10, target.config.vocab_size, (batch, 40))
        settings = GenerationSettings(max_new_tokens=new)

        def ours(prompts=prompts, settings=settings):
            return [list(answer.tokens) for answer in decode(target.decoder, prompts, settings, KEY)]

        @torch.inference_mode()
        def theirs(prompts=prompts):
            # No end token on either side, so that all sequences run to the same length.
            options = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
            given = torch.tensor(prompts)
            return model.generate(given, attention_mask=torch.ones_like(given), **options)[:, 40:].tolist()

        assert ours() == theirs(), "layerwave and torch continue differently"
        taken = medians({"layerwave": ours, "torch": theirs}, rounds)
        result[f"batch {batch}"] = {
            "layerwave, tokens/s": batch * new / taken["layerwave"],
            "layerwave / torch": taken["torch"] / taken["layerwave"],
        }
    return result


def bench_bucket(new: int, rounds: int) -> dict:
    """A bucket of 1,024 slots, entered with 520 and with 900 tokens of prompt."""
    target = load_target("mini")
    tokens = np.random.default_rng(0).integers(10, target.config.vocab_size, 900)
    vocabulary = DraftVocabulary(np.arange(1024), target.config.vocab_size)
    draft, result = initial_draft(target, (2, 6, 9), vocabulary, KEY), {}

    def run(drafted: tuple, length: int, new: int):
        return decode(target.decoder, [tokens[:length]], GenerationSettings(max_new_tokens=new), KEY, *drafted)[0]

    for name, drafted in (("plain", ()), ("60 nodes", (draft, TreeSettings()))):
        # What the prompt's own pass costs is taken off with a run of one token.
        sides = {(length, n): partial(run, drafted, length, n) for length in (520, 900) for n in (1, new)}
        taken = medians(sides, rounds)
        cost = {n: (taken[n, new] - taken[n, 1]) / run(drafted, n, new).rounds for n in (520, 900)}
        result[name] = {"ms a round at 520": 1e3 * cost[520], "at 900 / at 520": cost[900] / cost[520]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    parts = {
        "scripted": lambda: bench_scripted(args.new, args.rounds),
        "plain": lambda: bench_plain(4 * args.new, args.rounds),
        "bucket": lambda: bench_bucket(120, args.rounds),
    }
    print(json.dumps({part: parts[part]() for part in args.parts}, indent=1))


if __name__ == "__main__":
    main()
