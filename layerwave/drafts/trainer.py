"""Trains a draft for every layer set of a run, all on one target pass a batch, in the same order, from the same seed.

On the target's mesh, `data` shares out the rows of every batch and `model` the target's parameters; every device has
all drafts, whose gradients the compiler sums.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from layerwave.drafts.checkpoint import load_draft, save_draft
from layerwave.drafts.config import DraftConfig
from layerwave.drafts.eagle3 import Draft
from layerwave.drafts.examples import Examples
from layerwave.drafts.loader import PADDING, Batch, Rows, split
from layerwave.drafts.metrics import MetricsLog
from layerwave.drafts.run import Run
from layerwave.drafts.settings import FREE, TrainSettings
from layerwave.drafts.stacks import (
    Observed,
    Optimiser,
    Report,
    Stack,
    evaluation_step,
    initial_stacks,
    train_step,
    union,
)
from layerwave.drafts.stored import StoredStates, require_disk, store_states
from layerwave.drafts.unroll import UnrollSums
from layerwave.drafts.vocabulary import DraftVocabulary
from layerwave.errors import LayerwaveError
from layerwave.files.lock import only_run
from layerwave.files.writing import make_folder
from layerwave.targets import Target
from layerwave.targets.mesh import DATA, on_mesh, shares

logger = logging.getLogger(__name__)

DRAFT_VOCABULARY = 32_000
"""Size of the draft vocabulary unless the settings name another or the target has fewer tokens (SpecForge)."""

Progress = Callable[[int, int, int], None]
"""Called after each step with steps done, steps in all, and tokens done since the start or resume."""


def train(
    target: Target,
    examples: Examples,
    layer_sets: Sequence[Sequence[int]],
    settings: TrainSettings,
    out: str | os.PathLike[str],
    *,
    vocabulary: DraftVocabulary | None = None,
    states: str | os.PathLike[str] | None = None,
    max_disk_gb: float = 50.0,
    tensorboard: bool = False,
    progress: Progress | None = None,
    announce: Callable[[str], None] = logger.info,
) -> list[Draft]:
    """Trains drafts on `examples`, or goes on where a run of the same folder stopped; a finished run is only read.

    Args:
        target: what `load_target` returned; it is not trained. Its mesh is the one that is trained on.
        layer_sets: layer outputs, 0-based, for each draft.
        out: folder of the run, see run.py. What changes the parameters has to be the same when it is resumed.
        vocabulary: of the drafts; by default the most frequent tokens under the loss mask of the training examples.
        states: folder in which the target's states are stored once and read back in every epoch (see stored.py).
        max_disk_gb: most gigabytes that they may take. tensorboard: write RUN/tensorboard as well.
        announce: takes sentences for the user, such as how much disk is to be used.

    Returns:
        The drafts in the order of `layer_sets`, as RUN/drafts holds them.

    Raises:
        LayerwaveError: no layer set, one twice or with layers that the target does not have; nothing to predict; fewer
            rows than a batch has, or a batch that the mesh does not divide; a folder of something else, or that another
            process writes; a loss or gradient that is not finite (step, layer set and example are named).
    """
    layer_sets = _checked(layer_sets, target)
    settings = replace(settings, max_length=min(settings.max_length, target.config.max_positions))
    if settings.batch_size % shares(target.mesh):
        raise LayerwaveError(
            f"batch_size is {settings.batch_size}, but the mesh has data={shares(target.mesh)}: pass a multiple of it"
        )
    training, held_out = split(examples, settings.held_out)
    counts = training.counts()
    if not counts.any():
        raise LayerwaveError("the loss mask is empty in every example: give conversations with an assistant's answers")
    if vocabulary is None:
        size = settings.draft_vocab_size or min(DRAFT_VOCABULARY, target.config.vocab_size)
        vocabulary = DraftVocabulary.from_counts(counts, size)
    rows = Rows.lay(training, settings.max_length, packed=settings.layout == "packed")
    steps = settings.steps or max(1, round(settings.epochs * len(rows.plan) / settings.batch_size))
    order = rows.shuffled(settings.batch_size, steps, settings.seed)
    identity = _identity(target, examples, vocabulary, layer_sets, settings, steps, states is not None)
    make_folder(Path(out).absolute().parent)
    with only_run(out), closing(Run.open(out, identity)) as run:
        folders = [run.draft_folder(layers) for layers in layer_sets]
        if run.step == steps and all(folder.is_dir() for folder in folders):
            announce(f"{run.folder} is finished after {steps} steps; nothing was trained")
            return [load_draft(folder) for folder in folders]
        data = [_Data(rows, None)]
        if held_out.rows:
            data.append(_Data(Rows.lay(held_out, settings.max_length, packed=settings.layout == "packed"), None))
        if states is not None:
            data = _stored(target, data, union(layer_sets), settings.batch_size, Path(states), max_disk_gb, announce)
        trainer = _Trainer(target, layer_sets, vocabulary, settings, steps, run, data)
        if run.step:
            announce(f"{run.folder} is resumed after step {run.step} of {steps}")
        with MetricsLog(run.folder, run.step, tensorboard=tensorboard) as log:
            trainer.fit(order, log, progress)
        drafts = trainer.trained()
        make_folder(run.folder / "drafts")
        for draft, folder in zip(drafts, folders, strict=True):
            save_draft(draft, folder)
        return drafts


@dataclass(frozen=True)
class _Data:
    """Rows, and their stored states if there are any."""

    rows: Rows
    stored: StoredStates | None

    def fetch(self, chosen: np.ndarray) -> tuple[Batch, Observed | None]:
        return self.rows.batch(chosen), None if self.stored is None else self.stored.read(chosen)


class _Trainer:
    """What stays the same over the steps of one run, and the drafts' state."""

    def __init__(
        self,
        target: Target,
        layer_sets: tuple[tuple[int, ...], ...],
        vocabulary: DraftVocabulary,
        settings: TrainSettings,
        steps: int,
        run: Run,
        data: list[_Data],
    ):
        self.target, self.layer_sets, self.settings, self.steps, self.run = target, layer_sets, settings, steps, run
        self.training, self.held_out = data[0], data[1] if len(data) > 1 else None
        self.target_def, self.target_params = nnx.split(target.decoder)
        self.layers, self.vocabulary = jnp.array(union(layer_sets)), jnp.asarray(vocabulary.tokens)
        warmup = round(settings.warmup * steps)
        self.optimiser = Optimiser(settings.learning_rate, warmup, steps, settings.clip, settings.weight_decay)
        self.stacks, self.states, self.untrained = initial_stacks(
            target, layer_sets, vocabulary, self.optimiser, seed=settings.seed, **settings.options
        )
        if target.mesh is not None:
            self.states = jax.device_put(self.states, on_mesh(target.mesh))
        if run.step:
            self.states = run.restore(self.states)

    def fit(self, order: Any, log: MetricsLog, progress: Progress | None) -> None:
        """All steps that are left, with evaluations and checkpoints in between and at the end."""
        rate, tokens = self.optimiser.schedule, 0
        batches = iter(order.map(self.training.fetch)[self.run.step :])
        for step in range(self.run.step + 1, self.steps + 1):
            started = time.monotonic()
            batch, observed = next(batches)
            reports = self._update(batch, observed, step)
            found = int((batch.documents != PADDING).sum())
            speed = found / (time.monotonic() - started)
            shared = {"learning_rate": float(rate(step - 1)), "tokens_per_second": speed}
            for i, report in _each(self.stacks, reports):
                values = {"loss": report.loss, "gradient_norm": report.norm, **_summary(report.sums), **shared}
                log.write(step, self.layer_sets[i], "train", values)
            last = step == self.steps
            if self.held_out and (last or step % self.settings.evaluate_every == 0):
                for i, sums in enumerate(self.evaluate(self.held_out)):
                    log.write(step, self.layer_sets[i], "held_out", _summary(sums))
            if last or step % self.settings.checkpoint_every == 0:
                log.commit()
                self.run.save(step, self.states)
            tokens += found
            if progress is not None:
                progress(step, self.steps, tokens)

    def _update(self, batch: Batch, observed: Observed | None, step: int) -> tuple[Report, ...]:
        self.states, reports = train_step(
            self.target_def,
            self.target_params,
            self.stacks,
            self.states,
            *self._placed(batch, observed),
            self.layers,
            self.vocabulary,
            self.settings.unroll,
            self.optimiser,
        )
        reports = jax.device_get(reports)
        unsound = [i for i, report in _each(self.stacks, reports) if not report.sound]
        if unsound:
            self._stop(batch, step, unsound)
        return reports

    def _placed(self, batch: Batch, observed: Observed | None) -> tuple[Batch, Observed | None]:
        """The rows shared out among the shares of the mesh."""
        if self.target.mesh is None:
            return batch, observed
        rows, states = on_mesh(self.target.mesh, DATA), on_mesh(self.target.mesh, None, DATA)
        return jax.device_put(batch, rows), observed and jax.device_put(observed, Observed(states, rows))

    def _stop(self, batch: Batch, step: int, unsound: list[int]) -> None:
        """Finds the examples by themselves that give no finite loss; the unsound drafts were not updated."""
        examples = self.training.rows.examples
        alone = Rows(examples, tuple((i,) for i in range(len(examples))), self.training.rows.length)
        guilty = []
        for index in np.unique(batch.documents[batch.documents != PADDING]):
            sums = self._sums(alone.batch(np.full(len(batch.tokens), index)), None)
            if not all(np.isfinite(sums[i].loss).all() for i in unsound):
                guilty.append(examples[index].where)
        sets = ", ".join(",".join(map(str, self.layer_sets[i])) for i in unsound)
        origin = f"from {'; '.join(guilty)}" if guilty else "in the gradient, each example alone has a finite loss"
        raise LayerwaveError(
            f"step {step}: loss or gradient of the layers {sets} is not finite ({origin}); no checkpoint of it was "
            "written: look at the example, load the target in float32, or pass a smaller learning_rate"
        )

    def evaluate(self, data: _Data) -> list[UnrollSums]:
        """Sums over all rows, one for each layer set."""
        totals: list[UnrollSums] | None = None
        for chosen in data.rows.in_order(self.settings.batch_size):
            sums = self._sums(*data.fetch(chosen))
            totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        return totals

    def _sums(self, batch: Batch, observed: Observed | None) -> list[UnrollSums]:
        sums = evaluation_step(
            self.target_def,
            self.target_params,
            self.stacks,
            self.states,
            *self._placed(batch, observed),
            self.layers,
            self.vocabulary,
            self.settings.unroll,
        )
        return [found for _, found in sorted(_each(self.stacks, jax.device_get(sums)), key=lambda item: item[0])]

    def trained(self) -> list[Draft]:
        """The drafts with the parameters of now."""
        drafts = list(self.untrained)
        for stack, state in zip(self.stacks, self.states, strict=True):
            for place, i in enumerate(stack.members):
                params = jax.tree.map(lambda x, place=place: x[place], state.params)
                drafts[i] = replace(drafts[i], module=nnx.merge(stack.graphdef, params))
        return drafts


def _each(stacks: Sequence[Stack], results: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """(place of the layer set, its part of a stack's result)."""
    for stack, result in zip(stacks, results, strict=True):
        for place, i in enumerate(stack.members):
            yield i, jax.tree.map(lambda x, place=place: x[place], result)


def _summary(sums: UnrollSums) -> dict[str, Any]:
    """What the metrics say of sums: lists have one number for each step of the training-time test."""
    return {
        "losses": sums.losses,
        "accuracy": sums.accuracy,
        "acceptance": sums.acceptance,
        "tau_greedy": sums.tau_greedy,
        "tau_sampled": sums.tau_sampled,
        "predicted": sums.asked,
    }


def _checked(layer_sets: Sequence[Sequence[int]], target: Target) -> tuple[tuple[int, ...], ...]:
    if not layer_sets:
        raise LayerwaveError("no layers to train a draft for: pass for example --layers 2,18,33")
    found = [DraftConfig.from_target(target.config, tuple(layers), 1).layers for layers in layer_sets]
    for layers in found:
        if found.count(layers) > 1:
            raise LayerwaveError(f"the layers {','.join(map(str, layers))} are given twice: name each set once")
    return tuple(found)


def _identity(
    target: Target,
    examples: Examples,
    vocabulary: DraftVocabulary,
    layer_sets: tuple[tuple[int, ...], ...],
    settings: TrainSettings,
    steps: int,
    offline: bool,
) -> dict[str, Any]:
    """What has to be the same for a run to be resumed."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.fingerprint.astype("<u8").tobytes() + np.packbits(example.loss_mask).tobytes())
    return {
        "target": target.name,
        "target fingerprint": target.fingerprint,
        "target dtype": str(target.decoder.dtype),
        "data fingerprint": digest.hexdigest(),
        "vocabulary fingerprint": vocabulary.fingerprint,
        "layer sets": layer_sets,
        "steps": steps,
        "stored states": offline,
        "settings": {name: value for name, value in asdict(settings).items() if name not in FREE},
        **({"warnings": examples.warnings} if examples.warnings else {}),
    }


def _stored(
    target: Target,
    data: list[_Data],
    layers: tuple[int, ...],
    batch_size: int,
    folder: Path,
    max_disk_gb: float,
    announce: Callable[[str], None],
) -> list[_Data]:
    """The same data with states on disk, which are computed where they are not there yet."""
    plans = [
        StoredStates.plan(target, part.rows, layers, batch_size, folder / name)
        for part, name in zip(data, ("train", "held_out"), strict=False)
    ]
    size = sum(plan.gigabytes(len(part.rows.plan)) for plan, part in zip(plans, data, strict=True))
    announce(
        f"storing the states of {len(layers)} layers and the normed ones of "
        f"{sum(len(part.rows.plan) for part in data)} rows in {folder}: {size:.2f} GB of disk, {max_disk_gb:g} allowed"
    )
    require_disk(size, folder, max_disk_gb)
    with only_run(folder):
        for plan, part in zip(plans, data, strict=True):
            store_states(target, part.rows, layers, plan, announce)
    return [_Data(part.rows, plan) for plan, part in zip(plans, data, strict=True)]
