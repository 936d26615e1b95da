"""From conversations to accepted lengths: one resumable run of stages in one folder.

OUT/study.json               identity: target, conversations, questions, settings
OUT/calibration.safetensors  see calibration
OUT/conversations.jsonl      what the target answered, if it was asked to
OUT/cascade/                 of a cascade: the scores of all sets, stage-0.json, …, and the runs of its rungs
OUT/candidates.json          the layer sets, their scores, and notes
OUT/seed-0/                  the run that trained all drafts together, see drafts/run.py; one folder a seed
OUT/evaluation-0.json        accepted lengths of all its drafts; one file a seed
OUT/seconds.json             wall clock by stage
OUT/validation.json          the result

A stage that was interrupted goes on where it was, and a finished one is read back: a run that was killed anywhere ends
in the same result, the seconds apart.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from layerwave.calibration import Calibration, calibrate, read_conversations
from layerwave.calibration.conversations import Conversations
from layerwave.decoding import Evaluation, distill, evaluate, read_questions
from layerwave.decoding.journal import Journal
from layerwave.decoding.questions import BUNDLED, fingerprint
from layerwave.drafts import Draft, decontaminate, load_draft
from layerwave.drafts.examples import Examples, examples
from layerwave.drafts.metrics import read_metrics
from layerwave.drafts.settings import TrainSettings
from layerwave.errors import LayerwaveError
from layerwave.files.identity import require_same
from layerwave.files.lock import only_run
from layerwave.files.reading import read_json, typed
from layerwave.files.writing import write_json
from layerwave.selection import PredictedAcceptance, check_layers, predicted_acceptance
from layerwave.selection.sets import all_sets
from layerwave.targets import Target
from layerwave.validation.candidates import Candidates, candidates, described
from layerwave.validation.cascade import cost, halve, shortlist, staying
from layerwave.validation.held_out import held_out_acceptance
from layerwave.validation.plan import SECONDS, seconds_taken
from layerwave.validation.result import Candidate, Layers, Stage, Validation
from layerwave.validation.settings import ValidationSettings

SCHEMA, VERSION = "layerwave.study", 1
CHUNK = 16
"""Sets whose predicted acceptance is a line of the journal: some seconds."""

_Predicted = tuple[tuple[tuple[float, ...], ...], tuple[float, ...], tuple[float, ...]]
"""Acceptance by sample, agreement and ridge of the sets of a line of the journal."""

Bars = Callable[[str], AbstractContextManager[Any]]
"""Opens the progress of a stage by its title, such as `layerwave.progress.Progress`; it may give None."""


def validate(
    target: Target,
    conversations: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
    out: str | os.PathLike[str],
    settings: ValidationSettings | None = None,
    *,
    questions: str | os.PathLike[str] = BUNDLED,
    bars: Bars = lambda title: nullcontext(),
    announce: Callable[[str], None] = lambda text: None,
) -> Validation:
    """Trains drafts for many layer sets and measures their accepted lengths: does a criterion predict them?

    Calibrates, lets methods, rules and chance choose layer sets, lets the target answer the conversations if the
    settings ask for it, trains the drafts of all sets together (same data, same order, same seed), and evaluates them
    on the questions; drafts and evaluation once a seed.

    Args:
        target: what `load_target` returned.
        conversations: to calibrate and to train on; those that share text with a question are left out.
        out: folder of the study. Run it again to resume.
        questions: a file that `read_questions` reads; by default those that come with layerwave.
        bars: opens the progress of a stage. announce: takes sentences for the user.

    Raises:
        LayerwaveError: a folder of something else or of another study (every difference is named), and what the stages
            raise: see `calibrate`, `candidates`, `distill`, `train`, `evaluate`.
    """
    settings = settings or ValidationSettings()
    with only_run(out):
        study = Study.open(target, conversations, Path(out), settings, Path(questions), bars, announce)
        calibration = study.calibrated()
        data = study.examples()
        stages = study.cascade(calibration, data) if settings.cascade else ()
        found = study.chosen(calibration, stages)
        seeds = settings.all_seeds
        evaluations, held_out = [], []
        for seed in seeds:
            study.trained(found.sets, data, seed)
            held_out.append(study.held_out(found.sets, seed))
            evaluations.append(study.evaluated(found.sets, seed))
        validation = Validation(
            target=target.name,
            target_fingerprint=target.fingerprint,
            calibration=calibration.fingerprint,
            data=study.data,
            settings=asdict(settings),
            candidates=found.sets,
            seeds=seeds,
            evaluations=tuple(evaluations),
            held_out=tuple(held_out) if all(held_out) else (),
            notes=(*study.notes, *found.notes),
            stages=stages,
            cost=cost(stages, len(found.sets), study.steps(seeds[0]), len(seeds)) if stages else {},
            seconds=study.seconds,
        )
        validation.save(study.folder / "validation.json")
        return validation


@dataclass(frozen=True)
class Study:
    """A folder that belongs to one study, and its stages."""

    target: Target
    conversations: Conversations
    """Without those that share text with a question."""
    notes: tuple[str, ...]
    data: str
    folder: Path
    settings: ValidationSettings
    questions: Path
    bars: Bars
    announce: Callable[[str], None]

    @classmethod
    def open(
        cls,
        target: Target,
        conversations: str | os.PathLike[str] | Sequence[Mapping[str, Any]] | Conversations,
        folder: Path,
        settings: ValidationSettings,
        questions: Path,
        bars: Bars,
        announce: Callable[[str], None],
    ) -> "Study":
        """A new folder, or that of the same study. Raises `LayerwaveError` for another."""
        asked = fingerprint(read_questions(questions))
        read = read_conversations(conversations)
        clean, hits = decontaminate(read, questions)
        shared = f"{len(hits)} conversations that share 13 words in a row with a question are left out"
        digest = hashlib.sha256()
        for conversation in clean:
            turns = [[turn.role, turn.content] for turn in conversation.turns]
            digest.update(json.dumps([turns, conversation.text]).encode())
        identity = {
            "target": target.name,
            "target fingerprint": target.fingerprint,
            "target dtype": str(target.decoder.dtype),
            "conversations": digest.hexdigest(),
            "questions": asked,
            "settings": settings.identity,
        }
        path = folder / "study.json"
        if not path.is_file() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise LayerwaveError(f"{folder} is there and holds no study of `layerwave validate`: give another --out")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LayerwaveError(f"{folder} cannot be made ({error.strerror}): give another --out") from None
        require_same(path, SCHEMA, VERSION, identity)
        notes = (shared,) if hits else ()
        return cls(target, clean, notes, digest.hexdigest(), folder, settings, questions, bars, announce)

    def calibrated(self) -> Calibration:
        """The calibration, made where it is not there yet."""
        path = self.folder / "calibration.safetensors"
        if path.exists():
            found = Calibration.load(path)
            if found.target_fingerprint != self.target.fingerprint:
                raise LayerwaveError(f"{path} is of another target: remove it, or give another --out")
            return found
        with self.clock("calibrate"), self.bars(f"calibrating {self.target.name}") as bar:
            found = calibrate(self.target, self.conversations, self.settings.calibration, progress=bar)
            found.save(path)
        return found

    def chosen(self, calibration: Calibration, stages: Sequence[Stage] = ()) -> Candidates:
        """The layer sets, chosen and scored where they are not yet: by methods, rules and chance, or by a cascade."""
        path = self.folder / "candidates.json"
        if path.exists():
            return typed(Candidates, read_json(path, "remove it"), path.name)
        with self.clock("select"), self.bars("scoring layer sets") as bar:
            if stages:
                found = described(calibration, {layers: ["cascade"] for layers in staying(stages[-1])})
            else:
                found = candidates(calibration, self.settings.candidates, progress=bar and bar.sets)
        write_json(path, asdict(found))
        return found

    def cascade(self, calibration: Calibration, data: Examples) -> tuple[Stage, ...]:
        """The stages from all sets of the sizes to the finalists, run where they have not been yet."""
        settings, folder = self.settings.cascade, self.folder / "cascade"
        folder.mkdir(exist_ok=True)
        given = [check_layers(layers, calibration.num_layers) for layers in self.settings.candidates.layers]

        def first() -> Stage:
            with self.clock("predict acceptance"), self.bars("predicting acceptance") as bar:
                found = predict_all(
                    calibration, self.settings.candidates.sizes, given, folder / "predicted.jsonl", bar and bar.sets
                )
            return shortlist(found, settings.shortlist, given)

        stages = [_once(folder / "stage-0.json", first)]
        for rung, share in enumerate(settings.rungs, 1):
            halved = partial(self.rung, rung, share, staying(stages[-1]), data)
            stages.append(_once(folder / f"stage-{rung}.json", halved))
        return tuple(stages)

    def rung(self, rung: int, share: float, sets: Sequence[Layers], data: Examples) -> Stage:
        """Trains drafts on a share of the steps, and halves them."""
        from layerwave.drafts.loader import split

        settings, folder = self.settings.train, self.folder / "cascade" / f"rung-{rung}"
        if settings.steps is None:
            little = replace(settings, epochs=settings.epochs * share)
        else:
            little = replace(settings, steps=max(1, round(settings.steps * share)))
        drafts = self.train(sets, data, little, folder, f"rung {rung}")
        with self.clock(f"compare, rung {rung}"), self.bars(f"comparing {len(sets)} drafts, rung {rung}") as bar:
            measured = held_out_acceptance(
                self.target,
                drafts,
                split(data, settings.held_out)[1],
                self.length,
                packed=settings.layout == "packed",
                progress=bar and (lambda done, total: bar.show(done, total, f"{done} of {total} rows")),
            )
        steps = max(line["step"] for line in read_metrics(folder))
        return halve(measured, sets, steps, self.settings.cascade.finalists)

    def examples(self) -> Examples:
        """What the drafts learn from."""
        target, source = self.target, self.conversations
        if self.settings.distill is not None:
            source = self.folder / "conversations.jsonl"
            with self.clock("distill"), self.bars(f"distilling {target.name}") as bar:
                distill(target, self.conversations, source, self.settings.distill, progress=bar)
        return examples(target.tokenizer, target.config.vocab_size, source, self.length)

    @property
    def length(self) -> int:
        """Tokens of an example at most."""
        return min(self.settings.train.max_length, self.target.config.max_positions)

    def run(self, seed: int) -> Path:
        """The folder of the drafts' training."""
        return self.folder / f"seed-{seed}"

    def trained(self, sets: Sequence[Candidate], data: Examples, seed: int) -> None:
        """Trains the drafts of all sets together."""
        settings = replace(self.settings.train, seed=seed)
        self.train([candidate.layers for candidate in sets], data, settings, self.run(seed), f"seed {seed}")

    def train(
        self, sets: Sequence[Layers], data: Examples, settings: TrainSettings, folder: Path, title: str
    ) -> list[Draft]:
        from layerwave.drafts.trainer import train  # its loader and checkpoints take seconds to import

        with self.clock(f"train, {title}"), self.bars(f"training {len(sets)} drafts, {title}") as bar:
            return train(self.target, data, sets, settings, folder, progress=bar and bar.steps, announce=self.announce)

    def steps(self, seed: int) -> int:
        """Steps of a finished training."""
        return max(line["step"] for line in read_metrics(self.run(seed)))

    def held_out(self, sets: Sequence[Candidate], seed: int) -> tuple[float, ...]:
        """First-step acceptance of each draft on the held-out examples after the last step; empty without such."""
        lines = [line for line in read_metrics(self.run(seed)) if line["split"] == "held_out"]
        last: dict[Layers, float] = {tuple(line["layers"]): line["acceptance"][0] for line in lines}
        return tuple(last[candidate.layers] for candidate in sets) if last else ()

    def evaluated(self, sets: Sequence[Candidate], seed: int) -> Evaluation:
        """Accepted lengths of all drafts."""
        drafts = {c.draft: load_draft(self.run(seed) / "drafts" / c.draft, self.dtype) for c in sets}
        out = self.folder / f"evaluation-{seed}.json"
        title = f"evaluating {len(sets)} drafts, seed {seed}"
        with self.clock(f"evaluate, seed {seed}"), self.bars(title) as bar:
            return evaluate(self.target, drafts, out, self.settings.evaluation, questions=self.questions, progress=bar)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.target.decoder.dtype)

    @property
    def seconds(self) -> dict[str, float]:
        """Wall clock by stage, of all attempts that could say so."""
        return seconds_taken(self.folder)

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            spent = self.seconds
            spent[stage] = round(spent.get(stage, 0.0) + time.monotonic() - started, 1)
            write_json(self.folder / SECONDS, spent)


def predict_all(
    calibration: Calibration,
    sizes: Sequence[int],
    given: Sequence[Layers],
    path: Path,
    progress: Callable[[int, int], None] | None = None,
) -> PredictedAcceptance:
    """Predicted acceptance of every set of the sizes, and of given ones; `path` is a journal that is gone on with."""
    sets = [tuple(row) for size in sizes for block in all_sets(calibration.num_layers, size) for row in block.tolist()]
    sets = list(dict.fromkeys([*sets, *given]))
    journal = Journal(path, {"calibration": calibration.fingerprint, "sets": len(sets)})
    records = journal.resume(_Predicted)
    for start in range(len(records) * CHUNK, len(sets), CHUNK):
        part = predicted_acceptance(calibration, sets[start : start + CHUNK])
        records.append([part.by_sample.tolist(), part.agreement.tolist(), part.ridge.tolist()])
        journal.append(records[-1])
        if progress is not None:
            progress(min(start + CHUNK, len(sets)), len(sets))
    by_sample, agreement, ridge = (np.array([x for record in records for x in record[place]]) for place in range(3))
    one = predicted_acceptance(calibration, sets[:1])
    return PredictedAcceptance(tuple(sets), by_sample, one.counts, agreement, ridge, one.covered)


def _once(path: Path, stage: Callable[[], Stage]) -> Stage:
    """The stage of the file, or a new one that is written to it."""
    if path.exists():
        return typed(Stage, read_json(path, "remove it"), path.name)
    found = stage()
    write_json(path, asdict(found))
    return found
