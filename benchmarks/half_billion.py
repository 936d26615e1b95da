"""The shape of Qwen2.5-0.5B, with random weights, as the costly benchmarks use it."""

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "dtype": "float32",
}
"""A `config.json` of Hugging Face. This file imports nothing: torch's side reads it where layerwave is absent."""


def random_target():
    """The shape as a `Target`; its weights are drawn on the device."""
    import jax
    from flax import nnx

    from layerwave.targets import Decoder, DecoderConfig, Target

    config = DecoderConfig.from_hf(CONFIG)
    decoder = jax.jit(lambda: nnx.split(Decoder(config, rngs=nnx.Rngs(0))))
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return Target("half-billion", config, nnx.merge(graphdef, decoder()[1]), None, "random")
