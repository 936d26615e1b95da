"""What a validation will take, before anything starts: sets, steps, tokens, answers and disk.

Seconds are not guessed: before the first steps are timed nobody knows them, and then the progress says what is left.
Of a study that has begun, the plan says what its stages have taken so far.
"""

from dataclasses import dataclass
from math import ceil, comb
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from layerwave.calibration import read_conversations
from layerwave.calibration.plan import plan_calibration
from layerwave.decoding import read_questions
from layerwave.decoding.questions import first_of_each
from layerwave.drafts import DraftConfig, Eagle3
from layerwave.drafts.examples import examples
from layerwave.files.reading import read_json, typed
from layerwave.selection import rules
from layerwave.targets import DecoderConfig
from layerwave.validation.candidates import METHODS, RULES, sets_to_predict
from layerwave.validation.settings import ValidationSettings

SECONDS = "seconds.json"

WIDE, QUICK, FEW = 1024, 1e-3, 8192
"""A target of at least this width does not go with a learning rate above this, nor with fewer tokens in the drafts."""


@dataclass(frozen=True)
class Training:
    """One run that trains drafts together: how many, and for how many steps."""

    drafts: int
    steps: int


@dataclass(frozen=True)
class ValidationPlan:
    """Numbers of everything, most of them upper bounds; bytes of what stays on disk."""

    samples: int
    """Conversations to calibrate on."""
    predicted: int
    """Layer sets whose predicted acceptance is computed, at most."""
    sets: int
    """Layer sets whose drafts are evaluated; at most, since methods may agree."""
    trainings: tuple[Training, ...]
    """In order: the rungs of a cascade, then one a seed."""
    tokens_per_step: int
    seeds: int
    answers: int
    """Of the evaluation, of all drafts and of plain decoding."""
    max_new_tokens: int
    calibration_bytes: int
    draft_bytes: int
    """Of one draft of the largest size, float32."""
    seconds: dict[str, float]
    """What stages have taken so far."""
    notes: tuple[str, ...]

    @property
    def disk(self) -> dict[str, int]:
        """Bytes. A checkpoint holds parameters and both moments; two are kept, and a third while it is written."""
        drafts = sum(training.drafts for training in self.trainings)
        most = max(training.drafts for training in self.trainings)
        return {
            "calibration": self.calibration_bytes,
            "checkpoints": 3 * self.draft_bytes * (2 * drafts + most),
            "drafts": self.draft_bytes * drafts,
        }

    @property
    def lines(self) -> tuple[str, ...]:
        """The plan in sentences."""
        steps = sum(training.steps for training in self.trainings)
        drafted = sum(training.drafts * training.steps for training in self.trainings)
        runs = ", ".join(f"{training.drafts} drafts for {training.steps:,} steps" for training in self.trainings)
        disk = ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in self.disk.items())
        spent = ", ".join(f"{stage} {seconds:,.0f} s" for stage, seconds in self.seconds.items())
        unknown = "not known before the first steps are timed; the progress of every stage then says what is left"
        return (
            f"calibrate: {self.samples:,} conversations at most, one pass of the target",
            f"select: predicted acceptance of about {self.predicted:,} layer sets; at most {self.sets} are evaluated",
            f"train: {runs}; {steps:,} target passes of {self.tokens_per_step:,} tokens, {drafted:,} draft-steps",
            f"evaluate: {self.answers:,} answers of up to {self.max_new_tokens:,} tokens",
            f"disk: {sum(self.disk.values()) / 1e9:.2f} GB at most ({disk})",
            f"time: {f'so far {spent}; the rest ' if spent else ''}{unknown}",
            *(f"note: {note}" for note in self.notes),
        )


def plan_validation(
    config: DecoderConfig,
    tokenizer: Any,
    dtype: str,
    conversations: str | Path,
    out: str | Path,
    settings: ValidationSettings,
    questions: str | Path,
) -> ValidationPlan:
    """The plan of a validation; of the target it needs config.json and the tokenizer only, and it writes nothing.

    Where the target is to answer the conversations first, the steps are those that the given answers make.

    Raises:
        LayerwaveError: unusable conversations or questions, and a calibration that does not fit into memory.
    """
    read = read_conversations(conversations)
    length = min(settings.train.max_length, config.max_positions)
    steps = settings.train.steps
    if steps is None:
        from layerwave.drafts.loader import Rows, split

        training, _ = split(examples(tokenizer, config.vocab_size, read, length), settings.train.held_out)
        rows = len(Rows.lay(training, length, packed=settings.train.layout == "packed").plan)
        steps = max(1, round(settings.train.epochs * rows / settings.train.batch_size))
    sizes, num_layers = settings.candidates.sizes, config.num_layers
    rungs: tuple[Training, ...] = ()
    if cascade := settings.cascade:
        predicted = sum(comb(num_layers, size) for size in sizes)
        sets = min(cascade.shortlist, predicted) + len(settings.candidates.layers)
        for share in cascade.rungs:
            rungs += (Training(sets, max(1, round(steps * share))),)
            sets = min(sets, max(ceil(sets / 2), cascade.finalists))
    else:
        sets = _most_sets(settings, num_layers)
        predicted = sets_to_predict(settings.candidates, num_layers)
    evaluation, asked = settings.evaluation, read_questions(questions)
    if evaluation.samples_per_category is not None:
        asked = first_of_each(asked, evaluation.samples_per_category)
    turns = sum(len(question.turns) for question in asked)
    memory = plan_calibration(config, dtype, settings.calibration)
    return ValidationPlan(
        samples=min(settings.calibration.samples, len(read)),
        predicted=predicted,
        sets=sets,
        trainings=(*rungs, *[Training(sets, steps)] * settings.seeds),
        tokens_per_step=settings.train.batch_size * length,
        seeds=settings.seeds,
        answers=settings.seeds * len(evaluation.temperatures) * turns * (1 + sets * len(evaluation.nodes)),
        max_new_tokens=evaluation.max_new_tokens,
        calibration_bytes=memory.sums // 2 + memory.token_sample,
        draft_bytes=_draft_bytes(config, max(sizes), settings),
        seconds=seconds_taken(Path(out)),
        notes=_notes(config, settings),
    )


def seconds_taken(study: Path) -> dict[str, float]:
    """Wall clock by stage of a study's folder; none of one that has not begun."""
    path = study / SECONDS
    return typed(dict[str, float], read_json(path, "remove it"), SECONDS) if path.is_file() else {}


def _most_sets(settings: ValidationSettings, num_layers: int) -> int:
    chosen = settings.candidates
    if not chosen.chosen:
        return len(set(chosen.layers))
    named = sum(
        min(comb(num_layers, size), len(METHODS) + len(set(rules(size)) & set(RULES)) + chosen.acceptance_sets)
        for size in chosen.sizes
    )
    return named + chosen.random + len(chosen.layers)


def _draft_bytes(config: DecoderConfig, size: int, settings: ValidationSettings) -> int:
    from layerwave.drafts.trainer import DRAFT_VOCABULARY

    vocabulary = settings.train.draft_vocab_size or min(DRAFT_VOCABULARY, config.vocab_size)
    draft = DraftConfig.from_target(config, tuple(range(size)), vocabulary, **settings.train.options)
    shapes = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: Eagle3(draft, rngs=nnx.Rngs(0)))))
    return 4 * sum(int(np.prod(shape.shape)) for shape in shapes)


def _notes(config: DecoderConfig, settings: ValidationSettings) -> tuple[str, ...]:
    rate, tokens = settings.train.learning_rate, settings.train.draft_vocab_size
    if config.hidden_size < WIDE:
        return ()
    unsuited = (
        (rate > QUICK, f"the learning rate is {rate:g} (SpecForge: 1e-4)"),
        (
            tokens is not None and tokens < min(FEW, config.vocab_size),
            f"the drafts know {tokens:,} tokens (SpecForge: 32,000)",
        ),
    )
    suits = f"which is for narrow targets; this one is {config.hidden_size:,} wide"
    return tuple(f"{what}, {suits}" for found, what in unsuited if found)
