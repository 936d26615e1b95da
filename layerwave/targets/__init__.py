"""Flax NNX decoder read from a Hugging Face checkpoint: config, layers, cache, loading."""

from layerwave.targets.config import DecoderConfig
from layerwave.targets.decoder import Decoder, DecoderOutput, KVCache
from layerwave.targets.mesh import make_mesh
from layerwave.targets.target import DTypeName, Target, load_target, read_config

__all__ = [
    "DTypeName",
    "Decoder",
    "DecoderConfig",
    "DecoderOutput",
    "KVCache",
    "Target",
    "load_target",
    "make_mesh",
    "read_config",
]
