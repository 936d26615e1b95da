"""Text from a target: plain batched generation."""

from layerwave.decoding.generate import GenerationSettings, generate

__all__ = ["GenerationSettings", "generate"]
