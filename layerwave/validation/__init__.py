"""Does a criterion predict accepted lengths? Layer sets, drafts for all of them, and what their drafts do."""

from layerwave.validation.result import Candidate, Stage, Standing, Validation

__all__ = ["Candidate", "Stage", "Standing", "Validation"]
