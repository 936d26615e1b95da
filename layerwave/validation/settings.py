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
TRAIN = TrainSettings(steps=200, batch_size=2, max_length=512, ttt_steps=1, learning_rate=3e-3)
EVALUATION = EvaluationSettings(nodes=(60,), temperatures=(0.0,), max_new_tokens=128)


@dataclass(frozen=True)
class ValidationSettings:
    """Settings of all stages; the defaults are a quick look, of about half an hour for the bundled target.

    Raises:
        LayerwaveError: no seed.
    """

    candidates: CandidateSettings = CANDIDATES
    seeds: int = 1
    """Trainings of every draft; their seeds are 0, 1, … More can be added to a finished validation."""
    calibration: CalibrationSettings = CALIBRATION
    train: TrainSettings = TRAIN
    """Of every draft; the seed is the validation's."""
    evaluation: EvaluationSettings = EVALUATION
    """The seed of the samples is the validation's."""
    distill: DistillSettings | None = None
    """Let the target answer the conversations itself before drafts are trained on them."""
    cascade: CascadeSettings | None = None
    """Look for the best of all sets of the sizes, instead of comparing what methods and chance choose."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise LayerwaveError(f"seeds is {self.seeds}, expected at least 1")

    @property
    def identity(self) -> dict[str, Any]:
        """What has to be the same for a validation to go on."""
        found = asdict(self)
        del found["seeds"]
        for name in (*FREE, "seed"):
            del found["train"][name]
        del found["evaluation"]["seed"]
        return found
