"""Runs drafts on the questions of a benchmark, beside plain decoding, in one resumable run.

A batch of questions is answered plainly and then with every draft and tree before the next one begins, so that a
machine's moods meet all alike. All decode the very same prompts: those of later turns hold the answers of plain
decoding, which a draft's must equal anyway. Each batch is appended to a journal beside the output.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Key

from layerwave.decoding.dialogue import Prompt, batches, converse, end_tokens
from layerwave.decoding.engine import Continuation, decode
from layerwave.decoding.evaluation import EvaluatedDraft, Evaluation, EvaluationSettings, Row, Run
from layerwave.decoding.journal import Journal, require_same_run
from layerwave.decoding.questions import BUNDLED, Question, fingerprint, first_of_each, read_questions
from layerwave.decoding.sampling import GenerationSettings
from layerwave.decoding.timing import timed
from layerwave.decoding.tree import TreeSettings
from layerwave.drafts import Draft, draft_tensors, require_target
from layerwave.errors import LayerwaveError
from layerwave.files.lock import only_run
from layerwave.targets import Target

Progress = Callable[[int, int, int], None]
"""Called with (questions done, questions in all, tokens made), a question counting once a temperature."""

Runs = list[tuple[str | None, Draft | None, TreeSettings | None]]
_Record = tuple[tuple[Row, ...], ...]
"""What is run at each temperature: (name, draft, tree); first plain decoding, which has none of them."""


def evaluate(
    target: Target,
    drafts: Mapping[str, Draft],
    out: str | os.PathLike[str],
    settings: EvaluationSettings | None = None,
    *,
    questions: str | os.PathLike[str] | Sequence[Mapping[str, Any]] = BUNDLED,
    progress: Progress | None = None,
) -> Evaluation:
    """Asks every question, all turns, and writes what was counted to `out`; see `summarize` for the statistics.

    An interrupted run goes on where it was, from the journal `OUT.partial`; a finished one is read back. A turn whose
    prompt leaves no position for an answer ends its question, which is counted.

    Args:
        drafts: by names for the tables.
        questions: what `read_questions` reads; by default those that come with layerwave.
        progress: called after each batch.

    Raises:
        LayerwaveError: no drafts, a draft of another target, unusable questions, no chat template, a target without end
            tokens, an output that another process writes, an output or a journal of another run, a damaged journal,
            or no answer with a round at all.
    """
    settings = settings or EvaluationSettings()
    if not drafts:
        raise LayerwaveError("no draft to evaluate: name at least one")
    for draft in drafts.values():
        require_target(draft, target)
    asked = read_questions(questions)
    if settings.samples_per_category is not None:
        asked = first_of_each(asked, settings.samples_per_category)
    evaluation = Evaluation(
        target=target.name,
        target_fingerprint=target.fingerprint,
        dtype=str(target.decoder.dtype),
        device=f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        drafts=tuple(EvaluatedDraft(name, draft.config.layers, _digest(draft)) for name, draft in drafts.items()),
        settings=settings,
        questions=fingerprint(asked),
        ids=tuple(question.id for question in asked),
        categories=tuple(question.category for question in asked),
    )
    out = Path(out)
    with only_run(out):
        journal = Journal.beside(out, evaluation.header)
        if out.exists() and not journal.path.exists():
            finished = Evaluation.load(out)
            require_same_run(finished.header, evaluation.header, out)
            return finished
        evaluation = replace(evaluation, runs=_measured(target, drafts, asked, settings, journal, progress))
        _require_rounds(evaluation)
        evaluation.save(out)
        journal.remove()
        return evaluation


def _measured(
    target: Target,
    drafts: Mapping[str, Draft],
    asked: Sequence[Question],
    settings: EvaluationSettings,
    journal: Journal,
    progress: Progress | None,
) -> tuple[Run, ...]:
    """All runs, from the batches in the journal and those that it lacks."""
    runs: Runs = [(None, None, None), *((name, drafts[name], tree) for name in drafts for tree in settings.trees)]
    prompts = [question.prompt for question in asked]
    plan = list(product(settings.temperatures, batches(prompts, settings.batch)))
    records = journal.resume(_Record)
    if len(records) > len(plan) or any(
        len(record) != len(runs) or any(len(rows) != len(batch) for rows in record)
        for record, (_, batch) in zip(records, plan, strict=False)
    ):
        raise LayerwaveError(f"{journal.path} is damaged (its records are not of this plan): remove it to start anew")
    done, tokens = sum(len(batch) for _, batch in plan[: len(records)]), 0
    for temperature, batch in plan[len(records) :]:
        found = _answer(target, [prompts[i] for i in batch], runs, temperature, settings)
        records.append(tuple(map(tuple, found)))
        journal.append([[asdict(row) for row in rows] for rows in found])
        done, tokens = done + len(batch), tokens + sum(row.tokens for rows in found for row in rows)
        if progress is not None:
            progress(done, len(prompts) * len(settings.temperatures), tokens)

    rows: dict[tuple[int, float], dict[int, Row]] = {}
    for (temperature, batch), record in zip(plan, records, strict=True):
        for place, made in enumerate(record):
            rows.setdefault((place, temperature), {}).update(zip(batch, made, strict=True))
    return tuple(
        Run(name, tree and tree.nodes, temperature, tuple(rows[place, temperature][i] for i in range(len(prompts))))
        for temperature in settings.temperatures
        for place, (name, _, tree) in enumerate(runs)
    )


@dataclass
class _Tally:
    """What one run made of one question so far."""

    answers: list[Continuation] = field(default_factory=list)
    differing: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, answer: Continuation, plain: Continuation, seconds: float) -> None:
        if answer.tokens != plain.tokens:
            pairs = zip(answer.tokens, plain.tokens, strict=False)
            shorter = min(len(answer.tokens), len(plain.tokens))
            place = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
            self.differing.append((len(self.answers), place))
        self.answers.append(answer)
        self.seconds += seconds

    def row(self, levels: int, ended: str) -> Row:
        answers = self.answers
        return Row(
            tokens=sum(len(answer.tokens) for answer in answers),
            emitted=sum(answer.emitted for answer in answers),
            accepted=tuple(sum(int(answer.accepted[depth]) for answer in answers) for depth in range(levels)),
            drafted=sum(answer.drafted for answer in answers),
            seconds=self.seconds,
            stops=dict(Counter(answer.stop for answer in answers)),
            empty=sum(len(answer.tokens) == 1 and answer.stop == "end_token" for answer in answers),
            differing=tuple(self.differing),
            ended=ended,
        )


def _answer(
    target: Target, prompts: list[Prompt], runs: Runs, temperature: float, settings: EvaluationSettings
) -> list[list[Row]]:
    """A batch in all runs: for each run its rows, one a prompt."""
    generation = GenerationSettings(settings.max_new_tokens, temperature, end_tokens(target))
    tallies = [[_Tally() for _ in prompts] for _ in runs]

    def answer(asking: list[int], ids: list[list[int]], keys: Key[Array, " b"]) -> list[tuple[int, ...]]:
        plain: list[Continuation] = []
        for tally, (_, draft, tree) in zip(tallies, runs, strict=True):
            made, seconds = timed(partial(decode, target.decoder, ids, generation, keys, draft, tree))
            plain = plain or made
            for i, ours, theirs in zip(asking, made, plain, strict=False):
                tally[i].add(ours, theirs, seconds / len(asking))
        return [continuation.tokens for continuation in plain]

    dialogues = converse(
        target,
        prompts,
        answer,
        seed=settings.seed,
        room=target.config.max_positions - 1,
        batch=settings.batch,
        end_tokens=generation.end_tokens,
    )
    levels = [1 if tree is None else tree.levels for _, _, tree in runs]
    return [
        [counted.row(depth, dialogue.ended) for counted, dialogue in zip(tally, dialogues, strict=True)]
        for depth, tally in zip(levels, tallies, strict=True)
    ]


def _digest(draft: Draft) -> str:
    """Digest of configuration and tensors."""
    digest = hashlib.sha256(json.dumps(draft.config.to_json(), sort_keys=True).encode())
    for name, tensor in sorted(draft_tensors(draft).items()):
        digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()


def _require_rounds(evaluation: Evaluation) -> None:
    for run in evaluation.runs:
        if not any(row.rounds for row in run.rows):
            ended = Counter(row.ended for row in run.rows if row.ended)
            raise LayerwaveError(
                f"not one round of decoding at temperature {run.temperature:g} ({sum(row.empty for row in run.rows)} "
                f"empty answers; {', '.join(f'{count} {why}' for why, count in ended.items()) or 'none ended early'}): "
                "give questions that the target has room for, and a greater max_new_tokens"
            )
