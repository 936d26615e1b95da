"""Conversations to training examples: token ids, and which of them the draft learns to predict.

Chat templates do not say which part of a rendering the assistant spoke. So each answer is found by comparing three
renderings: of the turns before it with a generation prompt, which is what the target is given when it answers; of the
turns up to it; and of the same turns with a `PROBE` for the answer, which shows what the template writes around one.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from layerwave.calibration.conversations import Conversation, Conversations, Turn, read_conversations
from layerwave.calibration.tokens import (
    TemplateRefusalError,
    check_vocabulary,
    fingerprints,
    leading_bos,
    render,
    warn_of_today,
)
from layerwave.errors import LayerwaveError
from layerwave.warned import warnings_kept

PROBE = "\ue000answer\ue001"
"""Stands for an answer: private-use characters at its ends, which no template trims and no text puts together so."""
FIRST_PREDICTED = 2
"""Slot t of a draft reads the token at t + 1 and predicts the one at t + 2: the first two are never predicted."""


@dataclass(frozen=True)
class Example:
    """One sequence to train on.

    loss_mask: tokens that the draft shall learn to predict. where: place in the file, for messages.
    fingerprint: of the token ids, see `layerwave.calibration.tokens.fingerprint`; unique within one `Examples`.
    """

    tokens: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    where: str
    fingerprint: np.uint64


@dataclass(frozen=True)
class Examples(Sequence[Example]):
    """Examples in the order of the file, and what was left out on the way.

    tallies: numbers of rows and examples by what became of them. vocab_size: of the target. warnings: what was warned
    of meanwhile.
    """

    rows: tuple[Example, ...]
    tallies: dict[str, int]
    vocab_size: int
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def counts(self) -> Int64[np.ndarray, " V"]:
        """How often each of the target's tokens is to be predicted."""
        counts = np.zeros(self.vocab_size, np.int64)
        for row in self.rows:
            counts += np.bincount(row.tokens[FIRST_PREDICTED:][row.loss_mask[FIRST_PREDICTED:]], minlength=len(counts))
        return counts


class _Answer(NamedTuple):
    """Places in a rendering where the target began to speak, and where it fell silent."""

    start: int
    stop: int


class _Rendering(NamedTuple):
    text: str
    answers: tuple[_Answer, ...]


def examples(
    tokenizer: Any,
    vocab_size: int,
    conversations: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
    max_length: int,
) -> Examples:
    """Tokenises conversations as calibration does, and marks what the assistant said.

    Marked are the tokens of each answer, reasoning included where the rendering holds it, up to its end-of-turn token;
    neither headers nor what the template writes after that token. A token that reaches from the header into the answer
    is not marked: the target, given the header, could not have produced it. An answer without a word, and one that
    nothing comes before, are context only. Of a plain text, which has no roles, every token but a BOS is marked.

    One conversation gives one example, unless later turns change how the template writes an earlier answer (Qwen3 takes
    the reasoning out of all but the last). Then it gives one for each such answer that ends with it, so that each is
    trained once, after the very tokens that the target answers to.

    Args:
        tokenizer: the target's. vocab_size: number of tokens that the target has embeddings for.
        conversations: a path, a list of rows, or what `read_conversations` returned.
        max_length: tokens; longer examples are cut, and left out where no token to predict remains.

    Raises:
        LayerwaveError: unusable conversations, no chat template, no table of offsets, a token outside the vocabulary,
            a template that refuses every conversation, or not one token to predict in all of them.
    """
    if max_length <= FIRST_PREDICTED:
        raise LayerwaveError(f"max_length is {max_length}, but nothing is predicted before token {FIRST_PREDICTED}")
    if not tokenizer.is_fast:
        raise LayerwaveError(
            "the tokenizer cannot tell which text a token covers: put tokenizer.json beside the weights"
        )
    conversations = read_conversations(conversations)
    with warnings_kept() as warnings:
        warn_of_today(tokenizer, conversations)
    end_of_turn = _special_tokens(tokenizer)
    found: list[tuple[np.ndarray, np.ndarray, str]] = []
    refused: list[str] = []
    mute = repeated = cut = late = 0
    for conversation in conversations:
        try:
            renderings = _renderings(tokenizer, conversation, end_of_turn)
        except TemplateRefusalError as error:
            refused.append(f"{conversation.where} ({error})")
            continue
        mute += not renderings
        repeated += len(renderings) > 1
        for rendering in renderings:
            tokens, mask = _mark(tokenizer, rendering)
            cut += len(tokens) > max_length
            tokens, mask = tokens[:max_length], mask[:max_length]
            if not mask[FIRST_PREDICTED:].any():
                late += 1
                continue
            check_vocabulary(tokenizer, vocab_size, tokens, conversation.where)
            found.append((tokens, mask, conversation.where))
    tallies = {
        "rows": len(conversations) + conversations.unusable,
        "rows without a word": conversations.unusable,
        "rows refused by the chat template": len(refused),
        "rows without an answer": mute,
        "rows in several examples": repeated,
        "examples cut to max_length": cut,
        "examples with nothing to predict": late,
    }
    if len(refused) == len(conversations):
        raise LayerwaveError(
            f"the chat template refuses every conversation, first {refused[0]}: "
            "give conversations of the form that it accepts"
        )
    if not found:
        raise LayerwaveError(
            f"not one token to predict in {len(conversations)} conversations ({mute} without an answer, {late} whose "
            f"answers are short or begin after max_length {max_length}): give conversations with an assistant's answers"
        )
    numbers = fingerprints(tokens for tokens, _, _ in found)
    rows = tuple(Example(*parts, number) for parts, number in zip(found, numbers, strict=True))
    return Examples(rows, tallies, vocab_size, tuple(warnings))


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")


def _renderings(tokenizer: Any, conversation: Conversation, end_of_turn: re.Pattern[str]) -> list[_Rendering]:
    """What to train on: usually the whole conversation, or nothing where there is no answer in it."""
    turns, where = conversation.turns, conversation.where
    if not turns:
        return [_Rendering(conversation.text, (_Answer(0, len(conversation.text)),))]
    whole = render(tokenizer, turns, where)
    found: list[_Rendering] = []
    for i, turn in enumerate(turns):
        if i == 0 or turn.role != "assistant" or not turn.content.strip():
            continue
        text = render(tokenizer, turns[: i + 1], where)
        answers = (_find_answer(tokenizer, turns[: i + 1], text, where, end_of_turn),)
        if found and _still_holds(text, found[-1]):
            answers = found.pop().answers + answers
        found.append(_Rendering(text, answers))
    if found and _still_holds(whole, found[-1]):
        found.append(_Rendering(whole, found.pop().answers))
    return found


def _still_holds(text: str, earlier: _Rendering) -> bool:
    return text.startswith(earlier.text[: earlier.answers[-1].stop])


def _find_answer(tokenizer: Any, turns: Sequence[Turn], text: str, where: str, end_of_turn: re.Pattern[str]) -> _Answer:
    """Where the last of the turns stands in `text`, their rendering."""
    history = render(tokenizer, turns[:-1], where)
    prompt = render(tokenizer, turns[:-1], where, add_generation_prompt=True)
    before, probe, after = render(tokenizer, (*turns[:-1], Turn("assistant", PROBE)), where).partition(PROBE)
    if prompt == history or not text.startswith(prompt):
        # The template knows no generation prompt, or opens what it does not write back (`<think>` of reasoning that it
        # takes out). Then an answer begins where its words do. A space is theirs: tokenizers join the two.
        prompt = before.rstrip(" ")
    stop = len(text) - len(after)
    once = probe and PROBE not in after
    if not (once and text.startswith(prompt) and text.endswith(after) and len(prompt) < stop):
        raise TemplateRefusalError(f"the answer in turn {len(turns)} cannot be told from what is written around it")
    end = end_of_turn.search(after)
    return _Answer(len(prompt), stop + (end.end() if end else 0))


def _mark(tokenizer: Any, rendering: _Rendering) -> tuple[Int32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Token ids of a rendering, as `layerwave.calibration.tokens.encode` gives them, and which belong to an answer."""
    text = rendering.text
    encoding = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    ids = encoding.input_ids
    starts, ends = np.array(encoding.offset_mapping, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(ids), bool)
    for start, stop in rendering.answers:
        inside = np.flatnonzero((starts >= start) & (starts < stop))
        first = inside[0] if len(inside) else 0
        # Some tokenizers do not count a leading space as part of the token (Llama-3's `trim_offsets`): what seems to
        # begin with the answer may hold the end of the header.
        if first and ends[first - 1] < start and ids[:first] != _ids(tokenizer, text[:start]):
            inside = inside[1:]
        mask[inside] = True
    found, wanted = leading_bos(tokenizer, ids)
    tokens = [tokenizer.bos_token_id] * wanted + ids[found:]
    return np.array(tokens, np.int32), np.concatenate([np.zeros(wanted, bool), mask[found:]])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
