"""Small random checkpoints, one for each way in which the supported families differ; built with torch."""

import zlib
from pathlib import Path

POSITIONS = 1500
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large weights: with the default 0.02 the layers would hardly change the stream, and a wrong one would pass.
    "initializer_range": 0.2,
}


def _rope(kind: str = "default", theta: float = 10000.0, **fields) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
_TIED = {"tie_word_embeddings": True}
# Far below the number of positions, and below that of the greedy continuations.
_WINDOW = {"sliding_window": 12}
_LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 2.5 * i for i in range(6)],
}
# Three quarters of 16 channels turn: 6 pairs.
_PHI = {**_WINDOW, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.14}
_GEMMA = {
    **_WINDOW,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_QWEN_EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
_MIXTRAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

# The first one of each family is the one that is also tried sharded and in bfloat16.
VARIANTS = {
    "llama": ("llama", _rope()),
    "llama3_rope_tied": ("llama", {**_rope("llama3", 5e5, factor=32.0, **_LLAMA3), **_TIED, "head_dim": 16}),
    "llama3_rope_8": ("llama", _rope("llama3", 5e5, factor=8.0, **_LLAMA3)),
    "llama_linear_biases": ("llama", {**_rope("linear", factor=4.0), "attention_bias": True, "mlp_bias": True}),
    "llama_dynamic": ("llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 512}),
    "llama_yarn_tied": ("llama", {**_rope("yarn", **_YARN, truncate=False, mscale=1.2, mscale_all_dim=0.7), **_TIED}),
    "mistral": ("mistral", {**_rope(), **_WINDOW}),
    "mistral_yarn_tied": ("mistral", {**_rope("yarn", **_YARN, beta_fast=16.0, beta_slow=2.0), **_TIED, **_WINDOW}),
    "mixtral": ("mixtral", {**_rope(theta=1e6), **_MIXTRAL_EXPERTS, "sliding_window": None}),
    "mixtral_window_tied": ("mixtral", {**_rope(), **_MIXTRAL_EXPERTS, **_WINDOW, **_TIED}),
    "qwen2_tied": ("qwen2", {**_rope(theta=1e6), **_TIED}),
    "qwen2_yarn_window": (
        "qwen2",
        {**_rope("yarn", 1e6, **_YARN), **_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_rope(theta=5e6), "head_dim": 16}),
    "qwen3_yarn_tied": ("qwen3", {**_rope("yarn", 1e6, **_YARN, attention_factor=1.3), **_TIED, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_rope(theta=1e6), **_QWEN_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_yarn_tied": (
        "qwen3_moe",
        {**_rope("yarn", 1e6, **_YARN), **_QWEN_EXPERTS, **_TIED, "norm_topk_prob": False},
    ),
    "gemma3_text": ("gemma3_text", {**_GEMMA, "rope_parameters": _GEMMA_ROPES}),
    "gemma3_text_untied": ("gemma3_text", {**_GEMMA, "tie_word_embeddings": False}),
    "gemma3": ("gemma3", {**_GEMMA, "rope_parameters": _GEMMA_ROPES}),
    "phi3_longrope": (
        "phi3",
        {**_PHI, **_rope("longrope", partial_rotary_factor=0.75, **_LONG), "original_max_position_embeddings": 256},
    ),
    "phi3_longrope_short_tied": (
        "phi3",
        {
            **_PHI,
            **_rope("longrope", partial_rotary_factor=0.75, **_LONG),
            **_TIED,
            "original_max_position_embeddings": 1600,
        },
    ),
    "phi3": ("phi3", {**_rope(), "sliding_window": None}),
    "olmo2": ("olmo2", _rope(theta=5e5)),
    "olmo2_yarn_tied": ("olmo2", {**_rope("yarn", 5e5, **_YARN), **_TIED}),
}
FAMILIES = {family: variant for variant, (family, _) in reversed(VARIANTS.items())}
"""The first variant of each family."""
GOLDEN_VARIANTS = (
    *("llama", "llama3_rope_tied", "llama_linear_biases", "qwen2_tied", "qwen3"),
    *("mistral_yarn_tied", "gemma3_text", "phi3_longrope", "olmo2", "qwen3_moe"),
)


def build(variant: str):
    """A torch model of the variant, every parameter random (norms and biases too), float32, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model_type, fields = VARIANTS[variant]
    torch.manual_seed(zlib.crc32(variant.encode()))
    if model_type == "gemma3":
        sizes = dict.fromkeys(("hidden_size", "intermediate_size", "image_size", "patch_size"), 16)
        vision = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = AutoConfig.for_model(
            model_type, text_config={**_COMMON, **fields}, vision_config=vision, mm_tokens_per_image=1
        )
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**_COMMON, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                # Gemma adds 1 to it.
                parameter.uniform_(0.5, 1.5).sub_(float("gemma" in model_type))
            elif "experts" in name or name.endswith("gate.weight"):
                parameter.normal_(0, _COMMON["initializer_range"])
    return model.eval().float()


def text_model(model):
    return getattr(model.model, "language_model", model.model)


def reference(model, tokens):
    """Residual stream after each layer `(N, T, D)`, final-normed states `(T, D)` and logits `(T, V)`, by torch."""
    import torch

    states = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, output: states.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in text_model(model).layers
    ]
    with torch.no_grad():
        normed = text_model(model)(tokens[None]).last_hidden_state
        logits = model.lm_head(normed)
    for hook in hooks:
        hook.remove()
    return torch.stack([s[0] for s in states]).float().numpy(), normed[0].float().numpy(), logits[0].float().numpy()


def greedy(model, prompt: list[int], steps: int) -> list[int]:
    """Greedy continuation by torch, without a cache."""
    import torch

    ids = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def random_tokens(seed: int):
    import numpy as np

    return np.random.default_rng(seed).integers(3, _COMMON["vocab_size"], POSITIONS)


GOLDEN = Path(__file__).parent / "golden"
