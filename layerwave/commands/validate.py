"""`layerwave validate`."""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from layerwave.calibration.settings import CalibrationSettings
from layerwave.commands.evaluate import interval
from layerwave.commands.printing import Json, join, parse_layers, print_json, print_table, progress_bar, table_of
from layerwave.decoding import DistillSettings, EvaluationSettings
from layerwave.drafts.settings import TrainSettings
from layerwave.targets import DTypeName
from layerwave.validation import CandidateSettings, CascadeSettings, ValidationSettings

_DEFAULT = ValidationSettings()
_CASCADE, _DISTILL = CascadeSettings(), DistillSettings()


@dataclass(frozen=True)
class Validate:
    """Train a draft for each of many layer sets and measure accepted lengths: does a criterion predict them?"""

    target: Annotated[Positional[str], arg(metavar="TARGET")]
    """Directory in Hugging Face format, hub id, or mini (the bundled model)."""
    conversations: Path
    """To calibrate and to train on; best what the target itself answered (layerwave distill)."""
    out: Path
    """Folder of the study. Run the same command again to resume."""
    questions: Path | None = None
    """Rows of question_id, category and turns, such as Spec-Bench's question.jsonl; by default 26 bundled questions."""
    sizes: str = "1,2,3"
    """Numbers of layers for which every method chooses."""
    random: int = _DEFAULT.candidates.random
    """Random sets of the largest size beside those of the methods, drawn over the whole range of the entropy."""
    acceptance_sets: int = _DEFAULT.candidates.acceptance_sets
    """Best sets of each size that the beam of predicted acceptance adds."""
    layers: UseAppendAction[tuple[str, ...]] = ()
    """A set of your own, as in --layers 5,23,35; in place of all others, once for each."""
    beside: FlagCreatePairsOff[bool] = False
    """Compare --layers with the sets of methods, rules and chance."""
    seeds: int = _DEFAULT.seeds
    """Trainings of every draft. More can be added to a finished study."""
    staged: FlagCreatePairsOff[bool] = False
    """Look for the best of all sets of the sizes: a shortlist by predicted acceptance is trained on little data, halved
    by measured acceptance, trained further, and so on; the finalists are evaluated."""
    cascade: CascadeSettings = _CASCADE
    """Of --staged."""
    train: TrainSettings = _DEFAULT.train
    """Of every draft."""
    calibration: CalibrationSettings = _DEFAULT.calibration
    evaluation: EvaluationSettings = _DEFAULT.evaluation
    distill: FlagCreatePairsOff[bool] = False
    """Let the target answer the conversations itself before drafts are trained on them."""
    distillation: DistillSettings = _DISTILL
    """Of --distill."""
    target_dtype: DTypeName = "float32"
    """Of the target's parameters and activations, and of the drafts' when they are evaluated."""
    mesh: str | None = None
    """Devices, as in data=4,model=2: shares of a batch, and devices that share the target's parameters."""
    dry_run: FlagCreatePairsOff[bool] = False
    """Print what it would take, and stop; nothing is written."""
    json: Json = False

    @property
    def settings(self) -> ValidationSettings:
        candidates = CandidateSettings(
            sizes=tuple(parse_layers(self.sizes, "sizes", "1,2,3")),
            random=self.random,
            acceptance_sets=self.acceptance_sets,
            layers=tuple(tuple(sorted(parse_layers(text))) for text in self.layers),
            beside=self.beside,
        )
        return ValidationSettings(
            candidates,
            self.seeds,
            self.calibration,
            self.train,
            self.evaluation,
            self.distillation if self.distill else None,
            self.cascade if self.staged else None,
        )

    def run(self) -> None:
        from layerwave.decoding.questions import BUNDLED
        from layerwave.targets import load_target, make_mesh
        from layerwave.targets.target import identify
        from layerwave.validation import plan_validation, validate

        settings, questions = self.settings, self.questions or BUNDLED
        config, tokenizer, _ = identify(self.target)
        plan = plan_validation(config, tokenizer, self.target_dtype, self.conversations, self.out, settings, questions)
        if self.dry_run:
            print_json(asdict(plan)) if self.json else print("\n".join(plan.lines))
            return
        announce = partial(print, file=sys.stderr, flush=True)
        announce("\n".join(plan.lines))
        target = load_target(self.target, self.target_dtype, make_mesh(self.mesh))
        validation = validate(
            target,
            self.conversations,
            self.out,
            settings,
            questions=questions,
            bars=progress_bar,
            announce=announce,
        )
        if self.json:
            print_json(validation.record)
            return
        print_stages(validation)
        print_validation(validation)
        print(f"wrote {self.out}/validation.json")


def print_stages(validation) -> None:
    """Who left a cascade when and why, and what it cost; of the first stage those that stayed, and how many left."""
    for stage in validation.stages:
        shown = [found for found in stage.standings if found.stays or stage.steps]
        print(f"{stage.measure} after {stage.steps:,} steps, {len(stage.standings):,} layer sets")
        table = table_of("layers", "boundaries", "acceptance", "minus the best", "stays", "why")
        for found in shown:
            error = "" if found.standard_error is None else f" ± {found.standard_error:.4f}"
            table.add_row(
                join(found.layers),
                join(layer + 1 for layer in found.layers),
                f"{found.value:.4f}",
                f"{found.behind:+.4f}{error}" if found.behind else "best",
                "yes" if found.stays else "no",
                found.why,
            )
        print_table(table)
        if hidden := len(stage.standings) - len(shown):
            print(f"{hidden:,} others left\n")
    if validation.cost:
        print("; ".join(f"{what}: {number:,}" for what, number in validation.cost.items()))


def print_validation(validation) -> None:
    """The table of layer sets, one for each tree and temperature, and what was left out."""
    from layerwave.decoding import summarize

    by_seed = [summarize(evaluation) for evaluation in validation.evaluations]
    runs = {(summary.nodes, summary.temperature): None for summary in by_seed[0]}
    for nodes, temperature in runs:
        print(f"{nodes} nodes, temperature {temperature:g}")
        table = table_of("layers", "boundaries", "chosen by", "S_1 (nats)", "own", "χ", "τ AVG", "speed-up")
        for candidate in validation.candidates:
            found = [
                summary
                for summaries in by_seed
                for summary in summaries
                if (summary.draft, summary.nodes, summary.temperature) == (candidate.draft, nodes, temperature)
            ]
            table.add_row(
                join(candidate.layers),
                join(candidate.boundaries),
                ", ".join(candidate.names),
                f"{candidate.entropy:.4f}",
                f"{candidate.informativeness:.4f}",
                f"{candidate.diversity:.4f}",
                " / ".join(interval(summary.average) for summary in found),
                " / ".join(interval(summary.speedup) for summary in found),
            )
        print_table(table)
    print("layers: outputs counted from 0; boundary = layer + 1; S_1 = own (informativeness) + χ (diversity)")
    print("τ AVG: tokens a verification round, columns weighted by their questions; intervals: 95 %, over questions")
    for note in validation.notes:
        print(f"note: {note}")
