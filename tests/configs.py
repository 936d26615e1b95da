"""Targets small enough to compile in a test; what a test needs otherwise it replaces."""

from dataclasses import replace

from layerwave.targets import DecoderConfig
from layerwave.targets.rope import Rope

LLAMA = DecoderConfig(
    model_type="llama",
    num_layers=3,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=23,
    max_positions=96,
    norm_eps=1e-6,
    rope=Rope(1e4),
    tie_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
)
QWEN3 = replace(LLAMA, model_type="qwen3", qk_norm=True)
