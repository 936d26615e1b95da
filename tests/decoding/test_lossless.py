"""Greedy answers of trained targets are the same with a draft."""

import json
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from layerwave.decoding import GenerationSettings, TreeSettings, decode, generate
from layerwave.drafts import DraftVocabulary, initial_draft
from layerwave.targets import load_target

TREE = TreeSettings(16, 4, 4)
NEAR = 1e-4
"""Two logits are a near tie when they differ by less. A pass over more tokens sums in another order, so it may decide a
near tie otherwise; that is no loss, and it is counted."""


def near_ties(target, prompts, batch, settings):
    """Decodes with and without a draft that proposes what the target often says; returns how many prompts differ by the
    decision of a near tie. Any other difference fails."""
    answers, found = [], []
    for first in range(0, len(prompts), batch):
        answers += generate(target.decoder, prompts[first : first + batch], settings, jax.random.key(0))
    said = np.bincount(np.concatenate(answers), minlength=target.config.vocab_size)
    layers = (1, target.config.num_layers // 2, target.config.num_layers - 1)
    draft = initial_draft(target, layers, DraftVocabulary.from_counts(said, 16), jax.random.key(1))
    for first in range(0, len(prompts), batch):
        found += decode(target.decoder, prompts[first : first + batch], settings, jax.random.key(0), draft, TREE)

    rounds, emitted = (sum(getattr(continuation, name) for continuation in found) for name in ("rounds", "emitted"))
    assert emitted > 1.05 * rounds  # else there was nothing to lose
    last = nnx.jit(lambda decoder, tokens, length: decoder.logits(decoder(tokens).normed[0, length - 1]))
    differing = 0
    for prompt, answer, continuation in zip(prompts, answers, found, strict=True):
        made = list(continuation.tokens)
        if made == answer:
            continue
        place = next(i for i, (a, b) in enumerate(zip(answer, made, strict=False)) if a != b)
        prefix = [*prompt, *answer[:place]]
        padded = np.zeros((1, 256), np.int32)
        padded[0, : len(prefix)] = prefix
        logits = np.asarray(last(target.decoder, jnp.asarray(padded), len(prefix)))
        assert logits.max() - logits[made[place]] < NEAR
        differing += 1
    return differing


def test_mini():
    """200 prompts of one to 80 tokens."""
    target = load_target("mini")
    folder = resources.files("layerwave") / "assets"
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [text for row in rows for text in row["turns"]]
    rows = [json.loads(line) for line in (folder / "conversations.jsonl").read_text(encoding="utf-8").splitlines()]
    texts += [turn["content"] for row in rows for turn in row["messages"]]
    ids = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompts = [tokens[: 1 + 7 * i % 80] for i, tokens in enumerate(tokens for tokens in ids if tokens)][:200]
    assert len(prompts) == 200
    settings = GenerationSettings(12, end_token=target.tokenizer.eos_token_id)
    assert near_ties(target, prompts, 50, settings) <= 2


def test_stories260k(shared_data):
    target = load_target(shared_data / "stories260k")
    texts = ["Once upon a time", "One day, a little girl", "The dog", "Tom and his mother went to the", "It was a"]
    prompts = [target.tokenizer(text)["input_ids"] for text in texts]
    assert near_ties(target, prompts, 5, GenerationSettings(36)) <= 1
