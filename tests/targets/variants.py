"""Small random checkpoints, one for each way in which the supported families differ; built with torch."""

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
    # Large weights: with the default 0.02 the layers would hardly change the stream, and a wrong one would pass.
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
VARIANTS = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3_rope_tied": ("llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    "llama_linear_biases": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen2_tied": (
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0}, "head_dim": 16}),
}


def build(variant: str):
    """A torch model of the variant, every parameter random (norms and biases too), float32, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = VARIANTS[variant]
    torch.manual_seed(sorted(VARIANTS).index(variant))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_COMMON, **fields)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def reference(model, tokens):
    """Residual stream after each layer `(N, T, D)`, final-normed states `(T, D)` and logits `(T, V)`, by torch."""
    import torch

    states = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, output: states.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        normed = model.model(tokens[None]).last_hidden_state
        logits = model.lm_head(normed)
    for hook in hooks:
        hook.remove()
    return torch.stack([s[0] for s in states]).numpy(), normed[0].numpy(), logits[0].numpy()


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
