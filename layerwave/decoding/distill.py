"""Training conversations in the target's own words: it answers the questions of a file, in one resumable run.

A draft learns to guess what its target says, so the answers of a data set are replaced by the target's. Conversations
are answered in batches. Each finished batch is appended to a journal beside the output, and when all are done, the
output is written in the order of the questions. A killed run goes on with the first batch that the journal lacks; since
batches depend on questions and settings alone, it ends in the same bytes.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from layerwave.calibration.conversations import Conversations, Turn, read_prompts
from layerwave.calibration.tokens import warn_of_today
from layerwave.decoding.dialogue import FULL, REFUSED, Dialogue, Prompt, batches, converse, end_tokens
from layerwave.decoding.generate import generate
from layerwave.decoding.journal import Journal, require_same_run
from layerwave.decoding.sampling import GenerationSettings
from layerwave.drafts.contamination import Hit, decontaminate
from layerwave.errors import LayerwaveError
from layerwave.files.lock import only_run
from layerwave.files.reading import read_object, typed
from layerwave.files.writing import whole_file, write_json
from layerwave.targets import Target
from layerwave.warned import warnings_kept

Progress = Callable[[int, int, int], None]
"""Called with (conversations done, conversations in all, tokens made)."""


@dataclass(frozen=True)
class DistillSettings:
    """How the target answers. Raises `LayerwaveError` for values out of range."""

    max_new_tokens: int = 1024
    """Tokens of an answer at most; one that reaches them is flagged."""
    temperature: float = 0.0
    """0 is greedy; greater values sample from the distribution sharpened or flattened by it."""
    seed: int = 0
    """Of the samples. Each conversation has a stream of its own, whatever else the file holds."""
    batch: int = 16
    """Conversations answered together: speed and memory."""

    def __post_init__(self) -> None:
        GenerationSettings(self.max_new_tokens, self.temperature)
        if self.batch < 1:
            raise LayerwaveError(f"batch is {self.batch}, expected at least 1")
        if not 0 <= self.seed < 2**32:
            raise LayerwaveError(f"seed is {self.seed}, expected a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class Distilled:
    """Numbers of rows, answers and tokens by what became of them; the prompts left out for the evaluation's sake."""

    tallies: dict[str, int]
    contaminated: tuple[Hit, ...]


def distill(
    target: Target,
    prompts: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
    out: str | os.PathLike[str],
    settings: DistillSettings | None = None,
    *,
    evaluation: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Distilled:
    """Lets the target answer every user's turn, its own earlier answers in view, and writes the conversations.

    A line of `out` is `{"id", "conversations": [{"role", "content"}, ...], "truncated"}`, which calibration, training
    and SpecForge read; `truncated` counts answers that reached `max_new_tokens`. Beside it, `OUT.run.json` says how it
    was made, and while the run lasts `OUT.partial` is its journal. A finished run is not repeated.

    System turns stay, answers of others do not; rows with a tool's turn are left out. A conversation ends early where
    the template refuses a turn, or the target has no positions left for it and an answer.

    Args:
        prompts: what `read_prompts` reads, or returned.
        evaluation: a file of questions; prompts that share text with it are left out, see `decontaminate`.
        progress: called after each batch.

    Raises:
        LayerwaveError: unusable prompts, no chat template, a target without end tokens or with one outside its
            vocabulary, an output that another process writes, an output or a journal of another run, a damaged journal,
            or no answer at all.
    """
    settings = settings or DistillSettings()
    read = read_prompts(prompts)
    conversations, hits = (read, ()) if evaluation is None else decontaminate(read, evaluation)
    asked, unfit = _prompts(conversations)
    left_out = {
        "rows": len(read) + read.unusable,
        "rows without a word": read.unusable,
        "rows that share text with the evaluation": len(hits),
        **unfit,
    }
    if not asked:
        raise LayerwaveError(f"nothing to ask ({listed(left_out)}): give rows with a user's turn")
    with warnings_kept() as warnings:
        warn_of_today(target.tokenizer, conversations)
    generation = GenerationSettings(settings.max_new_tokens, settings.temperature, end_tokens(target))
    run = {
        "schema": "layerwave.distill",
        "version": 1,
        "target": target.fingerprint,
        "dtype": str(target.decoder.dtype),
        "end_tokens": list(generation.end_tokens),
        "prompts": hashlib.sha256("".join(prompt.name for prompt in asked).encode()).hexdigest(),
        **asdict(settings),
    }
    work = _Work(Path(out), run)
    with only_run(work.out, work.description):
        made = work.finished()
        if made is None:
            plan = batches(asked, settings.batch)
            answered = work.journal.resume(tuple[_Record, ...])
            if [len(batch) for batch in plan][: len(answered)] != list(map(len, answered)):
                raise LayerwaveError(
                    f"{work.journal.path} is damaged (its records are not of this plan): remove it to start anew"
                )
            done, tokens = sum(map(len, answered)), 0
            for batch in plan[len(answered) :]:
                answered.append(tuple(_answer(target, [asked[i] for i in batch], generation, settings)))
                work.journal.append([asdict(record) for record in answered[-1]])
                done, tokens = done + len(batch), tokens + sum(record.tokens for record in answered[-1])
                if progress is not None:
                    progress(done, len(asked), tokens)
            records = dict(zip(chain(*plan), chain(*answered), strict=True))
            made = work.finish([records[i] for i in range(len(asked))], warnings)
    return Distilled({**left_out, **made}, hits)


def _prompts(conversations: Conversations) -> tuple[list[Prompt], dict[str, int]]:
    """What to ask, and how many rows cannot be asked for which reason."""
    found: list[Prompt] = []
    seen: Counter[str] = Counter()
    tools = mute = 0
    for conversation in conversations:
        if any(turn.role == "tool" for turn in conversation.turns):
            tools += 1
            continue
        questions: list[tuple[Turn, ...]] = []
        pending: list[Turn] = []
        for turn in conversation.turns:
            if turn.role != "assistant":
                pending.append(turn)
            if turn.role == "user":
                questions.append(tuple(pending))
                pending = []
        if not questions:
            mute += 1
            continue
        content = json.dumps([[turn.role, turn.content] for question in questions for turn in question])
        seen[content] += 1
        name = hashlib.sha256(f"{seen[content]} {content}".encode()).hexdigest()[:16]
        found.append(Prompt(tuple(questions), conversation.where, name))
    return found, {"rows with a tool's turn": tools, "rows without a user's turn": mute}


def _answer(
    target: Target, prompts: list[Prompt], generation: GenerationSettings, settings: DistillSettings
) -> list["_Record"]:
    """Answers a batch turn by turn. A record a prompt."""
    dialogues = converse(
        target,
        prompts,
        lambda _, ids, keys: generate(target.decoder, ids, generation, keys),
        seed=settings.seed,
        room=target.config.max_positions - generation.max_new_tokens,
        batch=settings.batch,
        end_tokens=generation.end_tokens,
    )
    return [_record(*pair, generation.end_tokens) for pair in zip(prompts, dialogues, strict=True)]


@dataclass(frozen=True)
class _Row:
    """A line of the output."""

    id: str
    conversations: tuple[Turn, ...]
    truncated: int


@dataclass(frozen=True)
class _Record:
    """What became of a prompt; no row without an answer."""

    row: _Row | None
    answers: int
    tokens: int
    ended: str


def _record(prompt: Prompt, dialogue: Dialogue, end_tokens: tuple[int, ...]) -> _Record:
    made = dialogue.answers
    row = _Row(prompt.name, tuple(dialogue.turns), sum(answer[-1] not in end_tokens for answer in made))
    return _Record(row if made else None, len(made), sum(map(len, made)), dialogue.ended)


class _Work:
    """The files of one run: the journal, a record a batch; the output; its description."""

    def __init__(self, out: Path, run: dict[str, Any]):
        self.out, self.run, self.journal = out, run, Journal.beside(out, run)
        self.description = out.with_name(out.name + ".run.json")

    def finished(self) -> dict[str, int] | None:
        """The tallies of the run if it is over, None if there is something to do."""
        if self.journal.path.exists() or not self.out.exists():
            return None
        if not self.description.is_file():
            raise LayerwaveError(f"{self.out} exists, and no run of distill wrote it: remove it or give another --out")
        description = read_object(self.description, "remove it and the output, or give another --out")
        require_same_run(description.get("run"), self.run, self.out)
        return typed(dict[str, int], description.get("tallies"), f"{self.description}: tallies")

    def finish(self, records: list[_Record], warnings: list[str]) -> dict[str, int]:
        """Writes output and description, removes the journal, and returns the tallies."""
        rows = [asdict(record.row) for record in records if record.row is not None]
        ended = Counter(record.ended for record in records)
        tallies = {
            REFUSED: ended[REFUSED],
            FULL: ended[FULL],
            "conversations": len(rows),
            "answers": sum(record.answers for record in records),
            "answers cut at max_new_tokens": sum(row["truncated"] for row in rows),
            "tokens": sum(record.tokens for record in records),
        }
        if not rows:
            raise LayerwaveError(f"not one answer ({listed(tallies)}): give prompts that the target has room for")
        with whole_file(self.out) as path:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        write_json(self.description, {"run": self.run, "tallies": tallies, "warnings": warnings})
        self.journal.remove()
        return tallies


def listed(tallies: Mapping[str, int]) -> str:
    """The tallies that are not zero, in words."""
    return "; ".join(f"{count:,} {what}" for what, count in tallies.items() if count)
