"""EAGLE-3 drafts: module, draft vocabulary, training-time test, checkpoints."""

from layerwave.drafts.checkpoint import draft_from_tensors, draft_tensors, load_draft, save_draft
from layerwave.drafts.config import DraftConfig
from layerwave.drafts.contamination import Hit, decontaminate
from layerwave.drafts.eagle3 import Draft, Eagle3, initial_draft, require_target
from layerwave.drafts.examples import Example, Examples
from layerwave.drafts.unroll import Supervision, UnrollSettings, UnrollSums, supervise, unroll
from layerwave.drafts.vocabulary import DraftVocabulary

__all__ = [
    "Draft",
    "DraftConfig",
    "DraftVocabulary",
    "Eagle3",
    "Example",
    "Examples",
    "Hit",
    "Supervision",
    "UnrollSettings",
    "UnrollSums",
    "decontaminate",
    "draft_from_tensors",
    "draft_tensors",
    "initial_draft",
    "load_draft",
    "require_target",
    "save_draft",
    "supervise",
    "unroll",
]
