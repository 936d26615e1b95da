"""Text from a target: plain and speculative decoding in one engine."""

from layerwave.decoding.distill import Distilled, DistillSettings, distill
from layerwave.decoding.engine import Continuation, decode
from layerwave.decoding.generate import generate
from layerwave.decoding.sampling import GenerationSettings, Sampler
from layerwave.decoding.tree import TreeSettings

__all__ = [
    "Continuation",
    "DistillSettings",
    "Distilled",
    "GenerationSettings",
    "Sampler",
    "TreeSettings",
    "decode",
    "distill",
    "generate",
]
