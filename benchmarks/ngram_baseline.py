"""Held-out nats a byte of interpolated Kneser-Ney n-grams, beside the mini target on the same texts.

  python benchmarks/ngram_baseline.py --data DIR --model DIR [--order 5]

Two baselines of one order: over the model's own tokens, and over bytes. Both are trained on the model's training
conversations and scored on the same held-out ones, cut at the same length.
"""

import argparse
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer
from train_mini_target import END, LONG, held_out, nats_per_byte, read_conversations, render

from layerwave.targets.checkpoint import TensorFiles, load_decoder
from layerwave.targets.config import DecoderConfig


class KneserNey:
    """Interpolated Kneser-Ney (Chen and Goodman 1999, section 3.2) with one discount an order, by sorted arrays.

    A gram is one integer in base `size`; lower orders count the distinct symbols that precede a gram.
    """

    def __init__(self, stream: np.ndarray, size: int, order: int):
        self.size, self.order, self.levels = size, order, []
        grams, counts = np.unique(self._grams(stream, order), return_counts=True)
        for length in range(order, 0, -1):
            once, twice = (counts == 1).sum(), (counts == 2).sum()
            contexts, first, kinds = np.unique(grams // size, return_index=True, return_counts=True)
            totals = np.add.reduceat(counts, first)
            self.levels.append((grams, counts, contexts, totals, kinds, once / (once + 2 * twice)))
            grams, counts = np.unique(grams % size ** (length - 1), return_counts=True)

    def _grams(self, stream: np.ndarray, order: int) -> np.ndarray:
        """All grams of `order` symbols that end at each position from `order - 1` on."""
        gram = np.zeros(len(stream) - order + 1, np.int64)
        for i in range(order):
            gram = gram * self.size + stream[i : len(stream) - order + 1 + i]
        return gram

    def nats(self, stream: np.ndarray) -> float:
        """Sum of -log P over the stream; its first `order - 1` symbols are context alone."""
        gram = self._grams(stream, self.order)
        probability = np.full(len(gram), 1 / self.size)
        for length, (grams, counts, contexts, totals, kinds, discount) in zip(
            range(1, self.order + 1), reversed(self.levels), strict=True
        ):
            suffix = gram % self.size**length
            count = _look_up(grams, counts, suffix)
            total, kind = (_look_up(contexts, values, suffix // self.size) for values in (totals, kinds))
            seen, total = total > 0, np.maximum(total, 1)
            mixed = (np.maximum(count - discount, 0) + discount * kind * probability) / total
            probability = np.where(seen, mixed, probability)
        return float(-np.log(probability).sum())


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--order", type=int, default=5)
    args = parser.parse_args()
    pairs, pad = read_conversations(args.data), args.order - 1
    train = [render(pair) for pair in pairs if not held_out(pair[0])]
    test = [render(pair) for pair in pairs if held_out(pair[0])]
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    cut = [tokenizer.encode(text).ids[:LONG] for text in test]
    size = sum(len(tokenizer.decode(ids, skip_special_tokens=False).encode()) for ids in cut)

    encodings = {
        "tokens": (tokenizer.get_vocab_size(), end, lambda text: tokenizer.encode(text).ids, cut),
        "bytes": (
            257,
            256,
            lambda text: list(text.encode()),
            [list(tokenizer.decode(ids, skip_special_tokens=False).encode()) for ids in cut],
        ),
    }
    result = {"held_out_conversations": len(test), "held_out_bytes": size}
    for name, (symbols, start, encode, scored) in encodings.items():
        stream = np.array([i for text in train for i in [*[start] * pad, *encode(text)]], np.int64)
        model = KneserNey(stream, symbols, args.order)
        nats = sum(model.nats(np.array([*[start] * pad, *ids], np.int64)) for ids in scored)
        result[f"{args.order}-gram of {name}, nats a byte"] = round(nats / size, 4)

    config = DecoderConfig.from_hf(json.loads((args.model / "config.json").read_text()))
    decoder = load_decoder(config, TensorFiles.open(args.model), jnp.float32)
    result["mini target, nats a byte"] = round(nats_per_byte(*nnx.split(decoder), tokenizer, test), 4)
    result["perplexities a byte"] = {k: round(float(np.exp(v)), 3) for k, v in result.items() if "nats" in k}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
