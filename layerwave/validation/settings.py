"""Everything that decides what a validation finds."""

from dataclasses import asdict, dataclass
from typing import Any

from layerwave.calibration import CalibrationSettings
from layerwave.decoding import DistillSettings, EvaluationSettings
from layerwave.drafts.settings import FREE, TrainSettings
from layerwave.errors import LayerwaveError
from layerwave.validation.candidates import CandidateSettings
from layerwave.validation.cascade import CascadeSettings

CANDIDATES, CALIBRATION = CandidateSettings(), CalibrationSettings()
TRAIN = TrainSettings(
    steps=400,
    batch_size=2,
    max_length=512,
    ttt_steps=3,
    learning_rate=5e-3,
    draft_vocab_size=1024,
    fc_norm=True,
    checkpoint_every=100,
)
EVALUATION = EvaluationSettings(nodes=(60,), temperatures=(0.0,), max_new_tokens=128)


@dataclass(frozen=True)
class ValidationSettings:
    """Settings of all stages; the defaults are a quick look at a narrow target (the plan says where one is wide).

    Raises:
        LayerwaveError: no seed, or a cascade without held-out examples.
    """

    candidates: CandidateSettings = CANDIDATES
    seeds: int = 1
    """Trainings of every draft, with the seed of `train` and those after it. More can be added to a finished study."""
    calibration: CalibrationSettings = CALIBRATION
    train: TrainSettings = TRAIN
    """Of every draft. Norms before `fc`, since layers with large norms would otherwise be heard the loudest."""
    evaluation: EvaluationSettings = EVALUATION
    """Of every draft. All seeds of the training answer with the same seed of the samples."""
    distill: DistillSettings | None = None
    """Let the target answer the conversations itself before drafts are trained on them."""
    cascade: CascadeSettings | None = None
    """Look for the best of all sets of the sizes, instead of comparing what methods and chance choose."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise LayerwaveError(f"seeds is {self.seeds}, expected at least 1")
        if self.cascade is not None and self.train.held_out == 0:
            raise LayerwaveError("a cascade compares drafts on held-out examples, but held_out is 0: pass 0.05")

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """Seeds of the trainings."""
        return tuple(range(self.train.seed, self.train.seed + self.seeds))

    @property
    def identity(self) -> dict[str, Any]:
        """What has to be the same for a study to go on. Seeds are each the business of their own stages."""
        found = asdict(self)
        del found["seeds"], found["evaluation"]["seed"]
        for name in (*FREE, "seed"):
            del found["train"][name]
        return found
