"""`layerwave validate`."""

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from layerwave.calibration.settings import CalibrationSettings
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
        from layerwave.calibration import Calibration
        from layerwave.commands.report_card import draw_validation, print_validation
        from layerwave.decoding.questions import BUNDLED
        from layerwave.report import write_report
        from layerwave.targets import load_target, make_mesh
        from layerwave.targets.target import identify
        from layerwave.validation import plan_validation, validate
        from layerwave.validation.report_card import report_cards

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
        cards = report_cards(validation)
        drawn = draw_validation(validation, cards, self.out)
        with progress_bar("writing the report") as bar:
            calibration = Calibration.load(self.out / "calibration.safetensors")
            write_report(calibration, self.out / "report.html", validation=validation, progress=bar.sets)
        if self.json:
            print_json({**validation.record, "report_cards": [card.record for card in cards]})
            return
        print_stages(validation)
        print_validation(validation, cards)
        print(f"wrote {', '.join(map(str, (self.out / 'validation.json', *drawn, self.out / 'report.html')))}")


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
