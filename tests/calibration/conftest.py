"""A small target with random weights and a byte-level tokenizer, made in memory."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from layerwave.targets import Decoder, DecoderConfig, Target

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
SINK = "z"
"""The text byte whose embedding is planted 40 times as long as others."""


def make_tokenizer(*, bos: bool, template: str | None) -> PreTrainedTokenizerFast:
    """One token a byte; `bos` says whether it puts `<s>` before plain text."""
    specials = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(specials + alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.add_special_tokens(specials)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template)


def make_target(dtype: str = "float32", vocab_size: int = 262, layers: int = 4, features: int = 48) -> Target:
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen3",
            "hidden_act": "silu",
            "num_hidden_layers": layers,
            "hidden_size": features,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": vocab_size,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    )
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    tokenizer = make_tokenizer(bos=True, template=TEMPLATE)
    sink = tokenizer(SINK, add_special_tokens=False).input_ids[0]
    embedding = decoder.embed_tokens.embedding
    embedding[...] = embedding[...].at[sink].multiply(40)
    decoder.lm_head.embedding[...] *= 4  # next-token distributions of different entropy
    if dtype != "float32":  # the same weights, rounded
        abstract = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
        weights = jax.tree.map(lambda weight: weight.astype(dtype), nnx.state(decoder))
        decoder = nnx.merge(nnx.graphdef(abstract), weights)
    return Target("tiny", config, decoder, tokenizer, "0123456789abcdef")


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()
