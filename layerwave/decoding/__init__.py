"""Text from a target: plain and speculative decoding in one engine."""

from layerwave.decoding.distill import Distilled, DistillSettings, distill
from layerwave.decoding.engine import Continuation, decode, draft_round
from layerwave.decoding.evaluate import evaluate
from layerwave.decoding.evaluation import Evaluation, EvaluationSettings
from layerwave.decoding.generate import generate
from layerwave.decoding.questions import read_questions
from layerwave.decoding.sampling import GenerationSettings, Sampler
from layerwave.decoding.tau import summarize
from layerwave.decoding.tree import Tree, TreeSettings

__all__ = [
    "Continuation",
    "DistillSettings",
    "Distilled",
    "Evaluation",
    "EvaluationSettings",
    "GenerationSettings",
    "Sampler",
    "Tree",
    "TreeSettings",
    "decode",
    "distill",
    "draft_round",
    "evaluate",
    "generate",
    "read_questions",
    "summarize",
]
