"""Does a criterion predict accepted lengths? Layer sets, drafts for all of them, and what their drafts do."""

from layerwave.validation.candidates import Candidates, CandidateSettings, candidates
from layerwave.validation.cascade import CascadeSettings
from layerwave.validation.plan import ValidationPlan, plan_validation
from layerwave.validation.result import Candidate, Stage, Standing, Validation
from layerwave.validation.settings import ValidationSettings
from layerwave.validation.study import validate

__all__ = [
    "Candidate",
    "CandidateSettings",
    "Candidates",
    "CascadeSettings",
    "Stage",
    "Standing",
    "Validation",
    "ValidationPlan",
    "ValidationSettings",
    "candidates",
    "plan_validation",
    "validate",
]
