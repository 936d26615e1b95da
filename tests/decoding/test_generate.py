"""Generation with a cache continues as the whole sequence without one does."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layerwave.decoding import GenerationSettings, generate
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder
from tests.configs import QWEN3

CONFIG = replace(QWEN3, num_layers=2, vocab_size=11, max_positions=128)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1]]
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(CONFIG, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def greedy(decoder):
    return generate(decoder, PROMPTS, GenerationSettings(max_new_tokens=12), KEY)


def test_greedy_is_the_argmax_of_whole_sequences(decoder, greedy):
    last = nnx.jit(lambda decoder, tokens, length: decoder.logits(decoder(tokens).normed[0, length - 1]))
    for prompt, made in zip(PROMPTS, greedy, strict=True):
        ids = list(prompt)
        for token in made:
            padded = jnp.asarray([ids + [0] * (24 - len(ids))], jnp.int32)
            assert token == int(last(decoder, padded, len(ids)).argmax())
            ids.append(token)


def test_batch_mates_do_not_matter(decoder, greedy):
    for prompt, made in zip(PROMPTS, greedy, strict=True):
        assert generate(decoder, [prompt], GenerationSettings(max_new_tokens=12), KEY) == [made]


def test_prompts_may_be_arrays(decoder, greedy):
    settings = GenerationSettings(max_new_tokens=12)
    assert generate(decoder, [np.array(prompt) for prompt in PROMPTS], settings, KEY) == greedy
    table = [[1, 2, 3], [4, 5, 6], [7, 8, 0]]
    assert generate(decoder, np.array(table), settings, KEY) == generate(decoder, table, settings, KEY)


def test_stops_with_the_end_token(decoder, greedy):
    end = greedy[0][3]
    stopped = generate(decoder, PROMPTS, GenerationSettings(max_new_tokens=12, end_token=end), KEY)
    for made, whole in zip(stopped, greedy, strict=True):
        assert made == (whole[: whole.index(end) + 1] if end in whole else whole)


def test_sampling_follows_the_distribution(decoder):
    """5,000 first tokens against the softmax, within five standard deviations each."""
    made = generate(decoder, [PROMPTS[0]] * 5000, GenerationSettings(max_new_tokens=1, temperature=0.7), KEY)
    counts = jnp.bincount(jnp.asarray(made, jnp.int32)[:, 0], length=CONFIG.vocab_size)
    logits = decoder.logits(decoder(jnp.asarray([PROMPTS[0]], jnp.int32)).normed[0, -1])
    expected = jax.nn.softmax(logits / 0.7)
    deviation = jnp.sqrt(expected * (1 - expected) / 5000)
    assert bool(jnp.all(jnp.abs(counts / 5000 - expected) <= 5 * deviation))


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "each needs a token"),
        ([[1], []], {}, "each needs a token"),
        (np.zeros((0, 3), int), {}, "each needs a token"),
        (np.zeros((2, 0), int), {}, "each needs a token"),
        ([[1], [10, 11]], {}, "has the token 11, expected 0 to 10"),
        ([[-1]], {}, "has the token -1, expected 0 to 10"),
        ([[2**40]], {}, "has the token 1099511627776, expected"),
        (np.array([[3, 2**32 + 3]]), {}, "has the token 4294967299, expected"),
        ([[1] * 120], {"max_new_tokens": 9}, "leave room for 119"),
    ],
)
def test_prompt_faults(decoder, prompts, settings, message):
    with pytest.raises(LayerwaveError, match=message):
        generate(decoder, prompts, GenerationSettings(**settings), KEY)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}])
def test_setting_faults(settings):
    with pytest.raises(LayerwaveError, match=next(iter(settings))):
        GenerationSettings(**settings)
