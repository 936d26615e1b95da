"""`layerwave validate`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg

from layerwave.calibration.settings import CalibrationSettings
from layerwave.commands.printing import Json, parse_layers, print_json, progress_bar
from layerwave.decoding import EvaluationSettings
from layerwave.drafts.settings import TrainSettings
from layerwave.targets import DTypeName
from layerwave.validation import CandidateSettings, ValidationSettings

_DEFAULT = ValidationSettings()


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
    train: TrainSettings = _DEFAULT.train
    """Of every draft."""
    calibration: CalibrationSettings = _DEFAULT.calibration
    evaluation: EvaluationSettings = _DEFAULT.evaluation
    target_dtype: DTypeName = "float32"
    """Of the target's parameters and activations, and of the drafts' when they are evaluated."""
    mesh: str | None = None
    """Devices, as in data=4,model=2: shares of a batch, and devices that share the target's parameters."""
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
        return ValidationSettings(candidates, self.seeds, self.calibration, self.train, self.evaluation)

    def run(self) -> None:
        from layerwave.decoding.questions import BUNDLED
        from layerwave.targets import load_target, make_mesh
        from layerwave.validation import validate

        settings = self.settings
        target = load_target(self.target, self.target_dtype, make_mesh(self.mesh))
        validation = validate(
            target,
            self.conversations,
            self.out,
            settings,
            questions=self.questions or BUNDLED,
            bars=progress_bar,
            announce=lambda text: print(text, file=sys.stderr, flush=True),
        )
        if self.json:
            print_json(validation.record)
            return
        print_validation(validation)
        print(f"wrote {self.out}/validation.json")


def print_validation(validation) -> None:
    """The table of layer sets, by tree and temperature."""
    from layerwave.decoding import summarize

    summaries = [summarize(evaluation) for evaluation in validation.evaluations]
    for place in range(len(summaries[0]) // len(validation.candidates)):
        for candidate in validation.candidates:
            print(candidate.layers, candidate.names, candidate.entropy, place)
