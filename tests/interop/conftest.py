"""A random target of the smallest size that has every part a draft needs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layerwave.drafts import Draft, DraftVocabulary, initial_draft
from layerwave.targets import Decoder, Target
from layerwave.targets.rope import Rope
from tests.configs import LLAMA

NUM_LAYERS = 8
CONFIG = replace(
    LLAMA,
    num_layers=NUM_LAYERS,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=96,
    max_positions=256,
    norm_eps=1e-5,
    rope=Rope(5e4),
)


class NoTokenizer:
    pad_token_id = 0


@pytest.fixture(scope="session")
def target() -> Target:
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(3))
    scale = decoder.norm.scale
    # A norm that is not all ones, so that forgetting it is seen.
    scale[...] = jnp.linspace(0.2, 3.0, CONFIG.hidden_size, dtype=jnp.float32)
    return Target("somebody/tiny-llama", CONFIG, decoder, NoTokenizer(), "0123456789abcdef")


@pytest.fixture(scope="session")
def make_draft(target):
    """Makes a draft whose norms are not all ones, so that a norm left out or exchanged is seen."""

    def make(layers: tuple[int, ...], draft_vocab_size: int = 40, **options) -> Draft:
        counts = np.random.default_rng(0).permutation(CONFIG.vocab_size)
        vocabulary = DraftVocabulary.from_counts(counts, draft_vocab_size)
        draft = initial_draft(target, layers, vocabulary, jax.random.key(1), **options)
        params = nnx.state(draft.module, nnx.Param)
        keys = iter(jax.random.split(jax.random.key(2), 32))

        def stir(x):
            return x + 0.3 * jax.random.normal(next(keys), x.shape) if x.ndim == 1 else x

        nnx.update(draft.module, jax.tree.map(stir, params))
        return draft

    return make
