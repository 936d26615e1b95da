"""Conversations to batches of token ids: chat template, one BOS, seeded choice of samples, length buckets."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt64

from layerwave.calibration.conversations import Conversation, Conversations, Turn
from layerwave.calibration.settings import CalibrationSettings
from layerwave.errors import LayerwaveError
from layerwave.warned import warn

SMALLEST_BUCKET = 64
TEMPLATE_DATE = "26 Jul 2024"
"""What chat templates get as `date_string`, the default that Llama-3.x templates name. Left to themselves, some of
them write today's date into the system turn: tokens, fingerprints and results would change from day to day."""


class TemplateRefusalError(Exception):
    """The chat template does not render one conversation, for the reason in the message."""


@dataclass(frozen=True)
class Samples:
    """Token ids of the samples of one pass, and what was left out on the way.

    ids: one int32 array a sample, at least a block and at most `max_length` tokens long.
    fingerprints: one number a sample, see `fingerprint`.
    tallies: numbers of rows and samples by what became of them.
    """

    ids: tuple[Int32[np.ndarray, " _"], ...]
    fingerprints: UInt64[np.ndarray, " S"]
    tallies: dict[str, int]


@dataclass(frozen=True)
class Batch:
    """Samples of one length bucket, padded on the right; rows beyond `len(samples)` are all padding.

    samples: index of each row's sample.
    """

    samples: tuple[int, ...]
    tokens: Int32[np.ndarray, "b T"]
    lengths: Int32[np.ndarray, " b"]


def encode(tokenizer: Any, conversation: Conversation, *, add_generation_prompt: bool = False) -> list[int]:
    """Token ids of one conversation through the tokenizer's chat template, or of a plain text.

    There is never more than one BOS at the start, and there is one whenever the template writes it or the
    tokenizer puts it before plain text. No other special tokens are added.

    Raises:
        LayerwaveError: the tokenizer has no chat template and the conversation is not a plain text.
        TemplateRefusalError: the template refuses this conversation (for example two user turns in a row).
    """
    text = conversation.text
    if conversation.turns:
        text = render(tokenizer, conversation.turns, conversation.where, add_generation_prompt=add_generation_prompt)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    found, wanted = leading_bos(tokenizer, ids)
    return [tokenizer.bos_token_id] * wanted + ids[found:]


def render(tokenizer: Any, turns: Sequence[Turn], where: str, *, add_generation_prompt: bool = False) -> str:
    """What the tokenizer's chat template makes of the turns, in Jinja's sandbox; raises as `encode` does."""
    if not tokenizer.chat_template:
        raise LayerwaveError(
            f"{where}: a conversation, but the target's tokenizer has no chat template: put "
            'chat_template.jinja beside the tokenizer, or give plain {"text": "..."} rows'
        )
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, date_string=TEMPLATE_DATE
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise TemplateRefusalError(" ".join(f"{type(error).__name__}: {error}".split())) from error


def leading_bos(tokenizer: Any, ids: Sequence[int]) -> tuple[int, int]:
    """How many BOS a text's ids start with, and how many they should: one if any, or if the tokenizer puts it there."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return 0, 0
    found = next((place for place, token in enumerate(ids) if token != bos), len(ids))
    return found, int(found > 0 or adds_bos(tokenizer))


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its BOS before plain text."""
    return tokenizer("a").input_ids[0] == tokenizer.bos_token_id


def writes_today(tokenizer: Any) -> bool:
    """Whether the chat template writes the date of the day and leaves no way to give another."""
    template = str(tokenizer.chat_template)
    return "strftime_now" in template and "date_string" not in template


def warn_of_today(tokenizer: Any, conversations: Iterable[Conversation]) -> None:
    """Says so when the template writes the date of the day into one of the conversations."""
    if writes_today(tokenizer) and any(conversation.turns for conversation in conversations):
        warn(
            "the chat template writes today's date: tokens and fingerprints change from day to day; "
            "write a fixed date into the template"
        )


def check_vocabulary(tokenizer: Any, vocab_size: int, ids: Int32[np.ndarray, " T"], where: str) -> None:
    """Raises `LayerwaveError` for a token that the model has no embedding for."""
    if (highest := int(ids.max())) >= vocab_size:
        raise LayerwaveError(
            f"{where}: token {highest} ({tokenizer.convert_ids_to_tokens(highest)!r}) is "
            f"outside the model's vocabulary of {vocab_size}: use the tokenizer that belongs to the model, or "
            "remove the token from conversations and chat template"
        )


def fingerprint(ids: Int32[np.ndarray, " T"], repetition: int = 0) -> np.uint64:
    """First eight bytes of the SHA-256 of the token ids (int32, little-endian).

    A file may hold the same conversation several times, and each counts: `repetition` numbers them and is
    hashed with the ids when it is not 0. So fingerprints are unique within one calibration, and equal ones
    in two calibrations mean that a conversation would count twice.
    """
    content = ids.astype("<i4").tobytes() + (repetition.to_bytes(8, "little") if repetition else b"")
    return np.frombuffer(hashlib.sha256(content).digest()[:8], "<u8")[0].astype(np.uint64)


def fingerprints(samples: Iterable[Int32[np.ndarray, " _"]]) -> UInt64[np.ndarray, " S"]:
    """One fingerprint a sample, unique even where samples repeat."""
    seen: Counter = Counter()
    found = []
    for ids in samples:
        first = fingerprint(ids)
        found.append(fingerprint(ids, seen[first]))
        seen[first] += 1
    return np.array(found, np.uint64)


def draw_samples(
    tokenizer: Any, vocab_size: int, conversations: Conversations, settings: CalibrationSettings
) -> Samples:
    """Tokenises the first `settings.samples` conversations of a permutation from `settings.seed`.

    Samples of fewer tokens than a block are left out, longer ones than `max_length` are cut; both are
    counted. So are conversations that the chat template refuses. `vocab_size` is the number of tokens that the
    model has embeddings for; a tokenizer may own more as long as no sample holds them.

    Raises:
        LayerwaveError: no chat template, a template that refuses every conversation, a token outside the model's
            vocabulary, or every sample shorter than a block.
    """
    order = np.random.default_rng(settings.seed).permutation(len(conversations))[: settings.samples]
    warn_of_today(tokenizer, (conversations[row] for row in order))
    ids, lengths, refused, truncated = [], [], [], 0
    for row in order:
        try:
            encoded = encode(tokenizer, conversations[row])
        except TemplateRefusalError as error:
            refused.append(f"{conversations[row].where} ({error})")
            continue
        lengths.append(len(encoded))
        truncated += len(encoded) > settings.max_length
        if len(encoded) >= settings.block:
            ids.append(np.array(encoded[: settings.max_length], np.int32))
            check_vocabulary(tokenizer, vocab_size, ids[-1], conversations[row].where)
    if not lengths:
        raise LayerwaveError(
            f"the chat template refuses every conversation, first {refused[0]}: "
            "give conversations of the form that it accepts"
        )
    if not ids:
        raise LayerwaveError(
            f"every sample is shorter than a block of {settings.block} tokens ({len(lengths)} samples, the "
            f"longest of {max(lengths)} tokens): give longer conversations or a smaller block"
        )
    tallies = {
        "rows": len(conversations) + conversations.unusable,
        "rows without a word": conversations.unusable,
        "rows not drawn": len(conversations) - len(order),
        "rows refused by the chat template": len(refused),
        "samples shorter than a block": len(lengths) - len(ids),
        "samples cut to max_length": truncated,
    }
    return Samples(tuple(ids), fingerprints(ids), tallies)


def bucket(length: int, max_length: int) -> int:
    """Padded length of a sample: the next power of two from 64 on, at most `max_length`."""
    return min(max_length, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))


def batches(ids: Sequence[np.ndarray], max_length: int, batch_tokens: int, multiple: int = 1) -> Iterator[Batch]:
    """Right-padded batches of about `batch_tokens` tokens, one shape a length bucket, the longest first.

    A sample longer than `batch_tokens` is a batch of its own. The number of rows is a `multiple`, so that the shares
    of a mesh are equal.

    There are at most `1 + log2(max_length / 64)` shapes, rounded up. Rows of a bucket are spread evenly over
    its batches, so that few rows are padding.

    Raises:
        LayerwaveError: `batch_tokens` below 1.
    """
    if batch_tokens < 1:
        raise LayerwaveError(f"batch_tokens is {batch_tokens}, but must be >= 1: pass another batch_tokens")
    members: dict[int, list[int]] = {}
    for index, sample in enumerate(ids):
        members.setdefault(bucket(len(sample), max_length), []).append(index)
    for width in sorted(members, reverse=True):  # what does not fit into memory fails at once
        indices = members[width]
        most = max(multiple, batch_tokens // width // multiple * multiple)
        rows = math.ceil(len(indices) / math.ceil(len(indices) / most))
        rows = math.ceil(rows / multiple) * multiple
        for start in range(0, len(indices), rows):
            chosen = indices[start : start + rows]
            tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
            for row, index in enumerate(chosen):
                lengths[row] = len(ids[index])
                tokens[row, : lengths[row]] = ids[index]
            yield Batch(tuple(chosen), tokens, lengths)
