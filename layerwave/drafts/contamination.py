"""Which training conversations share text with an evaluation file: 13 words in a row, as is customary since GPT-3."""

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerwave.calibration.conversations import Conversation, Conversations, read_prompts

WORDS = 13


@dataclass(frozen=True)
class Hit:
    """A conversation that shares text with an evaluation row.

    where, evaluation: their places in the two files. words: the first words shared, normalised.
    """

    where: str
    evaluation: str
    words: str


def decontaminate(
    conversations: Conversations, evaluation: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations
) -> tuple[Conversations, tuple[Hit, ...]]:
    """Takes out the conversations that share `WORDS` words in a row with a turn of the evaluation.

    Words are runs of letters, digits and underscores after Unicode's NFKC and case folding; punctuation and spaces do
    not count. A turn of fewer words counts as a whole: it hits where another turn is the same words. (Scripts without
    spaces have few such words, and are mostly compared as wholes.)

    Args:
        evaluation: questions in any form that `read_prompts` reads, such as Spec-Bench's question.jsonl.

    Returns:
        The other conversations, and one hit for each that was taken out.

    Raises:
        LayerwaveError: an evaluation file that cannot be read.
    """
    places = {run: question.where for question in read_prompts(evaluation) for run in _runs(question)}
    clean, hits = [], []
    for conversation in conversations:
        shared = next((run for run in _runs(conversation) if run in places), None)
        if shared is None:
            clean.append(conversation)
        else:
            hits.append(Hit(conversation.where, places[shared], " ".join(shared)))
    return Conversations(tuple(clean), conversations.unusable), tuple(hits)


def _runs(conversation: Conversation) -> Iterator[tuple[str, ...]]:
    for text in [turn.content for turn in conversation.turns] or [conversation.text]:
        words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
        for start in range(max(len(words) - WORDS, 0) + 1 if words else 0):
            yield tuple(words[start : start + WORDS])
