"""Questions of an evaluation, as Spec-Bench asks them: rows of an id, a category and one or two turns."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from layerwave.calibration.conversations import Turn, rows_of_file
from layerwave.decoding.dialogue import Prompt
from layerwave.errors import LayerwaveError
from layerwave.files.reading import shown

BUNDLED = Path(str(resources.files("layerwave"))) / "assets" / "questions.jsonl"
"""Questions that come with layerwave: two of each category, short enough for the bundled target."""

COLUMNS = {
    "CODING": ("coding",),
    "EXTR": ("extraction",),
    "HUMAN": ("humanities",),
    "QA": ("qa",),
    "RAG": ("rag",),
    "ROLE": ("roleplay",),
    "STEM": ("stem",),
    "SUMM": ("summarization",),
    "TRANSL": ("translation",),
    "WRITING": ("writing",),
    "M/R": ("math", "reasoning", "math_reasoning"),
}
"""Columns of the paper's Table 2, and the categories of Spec-Bench that each holds."""

COLUMN_OF = {category: column for column, categories in COLUMNS.items() for category in categories}
_FIELDS = ("question_id", "category", "turns", "reference")
_FORM = '{"question_id": 81, "category": "writing", "turns": ["...", "..."]}'


@dataclass(frozen=True)
class Question:
    """What is asked one turn after the other, each with the answers before it in view."""

    id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def column(self) -> str:
        """Its column in the paper's Table 2."""
        return COLUMN_OF[self.category]

    @property
    def prompt(self) -> Prompt:
        content = json.dumps([self.id, self.category, self.turns])
        name = hashlib.sha256(content.encode()).hexdigest()[:16]
        return Prompt(tuple((Turn("user", turn),) for turn in self.turns), f"question {self.id}", name)


def read_questions(source: str | os.PathLike[str] | Sequence[Mapping[str, Any]]) -> tuple[Question, ...]:
    """Reads a file such as Spec-Bench's question.jsonl, or a list of its rows; `reference` is read over.

    Raises:
        LayerwaveError: a file that cannot be read or holds nothing; rows with missing or unknown fields, of an unknown
            category, without a turn or with an empty one, or with the id of another row (line or row number).
    """
    if isinstance(source, str | os.PathLike):
        rows = list(rows_of_file(Path(source), _FORM))
    else:
        rows = [(f"row {number}", row) for number, row in enumerate(source, 1)]
    if not rows:
        raise LayerwaveError(f"no questions: give rows like {_FORM}")
    questions = tuple(_question(row, where) for where, row in rows)
    id, times = Counter(question.id for question in questions).most_common(1)[0]
    if times > 1:
        raise LayerwaveError(f"{times} questions have the question_id {id!r}: give each its own")
    return questions


def first_of_each(questions: Sequence[Question], count: int) -> tuple[Question, ...]:
    """The first `count` questions of every category, in their order."""
    seen: Counter[str] = Counter()
    chosen = []
    for question in questions:
        seen[question.category] += 1
        if seen[question.category] <= count:
            chosen.append(question)
    return tuple(chosen)


def fingerprint(questions: Sequence[Question]) -> str:
    """Hexadecimal digest of what is asked, in this order."""
    return hashlib.sha256("".join(question.prompt.name for question in questions).encode()).hexdigest()


def _question(row: Any, where: str) -> Question:
    if not isinstance(row, Mapping) or not {"question_id", "category", "turns"} <= row.keys():
        keys = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise LayerwaveError(f"{where}: has {keys}, but must look like {_FORM}: give the fields that are missing")
    if unknown := sorted(map(str, row.keys() - set(_FIELDS))):
        raise LayerwaveError(
            f"{where}: unknown fields {', '.join(unknown)}, expected {', '.join(_FIELDS)}: remove or rename them"
        )
    id, category, turns = row["question_id"], row["category"], row["turns"]
    if isinstance(id, bool) or not (isinstance(id, int) or _is_text(id)):
        raise LayerwaveError(f"{where}: question_id is {shown(id)}, expected a whole number or a text")
    if not isinstance(category, str) or category not in COLUMN_OF:
        raise LayerwaveError(
            f"{where}: unknown category {shown(category)}, expected one of {', '.join(COLUMN_OF)}: use Spec-Bench's "
            "names"
        )
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns or not all(map(_is_text, turns)):
        raise LayerwaveError(f"{where}: turns must be a list of texts, none of them empty: got {shown(turns)}")
    return Question(id, category, tuple(turns))


def _is_text(turn: Any) -> bool:
    """Whether there is a word in it, and no half of a surrogate pair, which no tokenizer takes."""
    return isinstance(turn, str) and bool(turn.strip()) and not any("\ud800" <= c <= "\udfff" for c in turn)
