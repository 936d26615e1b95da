"""The decoder computes what torch transformers computes at 1,500 positions: golden files, and live where torch is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from layerwave.decoding import GenerationSettings, generate
from layerwave.targets import DecoderConfig
from layerwave.targets.checkpoint import TensorFiles, load_decoder
from tests.targets.variants import GOLDEN, VARIANTS, build, greedy, random_tokens, reference


def load(folder):
    tensors = TensorFiles.open(folder)
    raw = json.loads((folder / "config.json").read_text())
    config = DecoderConfig.from_hf(raw, has_head="lm_head.weight" in tensors.files)
    return load_decoder(config, tensors, jnp.dtype("float32"))


def assert_close(ours, theirs, what):
    """Largest difference within 1e-4 of the reference's scale."""
    difference = np.abs(np.asarray(ours) - theirs).max()
    assert difference <= 1e-4 * np.abs(theirs).max(), f"{what}: {difference} of {np.abs(theirs).max()}"


@nnx.jit
def forward(decoder, tokens):
    output = decoder(tokens)
    return output.states[:, 0], output.normed[0], decoder.logits(output.normed[0])


def greedy_with_cache(decoder, prompt, steps):
    return generate(decoder, [prompt], GenerationSettings(max_new_tokens=steps), jax.random.key(0))[0]


def assert_parity(decoder, tokens, kept, expected_states, expected_normed, expected_logits):
    states, normed, logits = forward(decoder, jnp.asarray(tokens, jnp.int32)[None])
    for layer, expected in enumerate(expected_states):
        assert_close(states[layer, kept], expected, f"layer {layer}")
    assert_close(normed[kept], expected_normed, "final norm")
    assert_close(logits[kept], expected_logits, "logits")


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden(variant):
    decoder, golden = load(GOLDEN / variant), load_file(GOLDEN / variant / "reference.safetensors")
    references = (golden[name] for name in ("states", "normed", "logits"))
    assert_parity(decoder, golden["tokens"], golden["positions"], *references)
    prompt = golden["tokens"][:8].tolist()
    assert greedy_with_cache(decoder, prompt, len(golden["greedy"])) == golden["greedy"].tolist()


@pytest.mark.parity
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_live(variant, sharded, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    model, tokens = build(variant), random_tokens(seed=11)
    model.save_pretrained(tmp_path, max_shard_size="30KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == sharded
    decoder = load(tmp_path)
    assert_parity(decoder, tokens, slice(None), *reference(model, torch.tensor(tokens)))
    assert greedy_with_cache(decoder, tokens[:8].tolist(), 24) == greedy(model, tokens[:8].tolist(), 24)


def test_rope_scaling_is_not_ignored():
    """Guards the golden test itself: with plain frequencies the llama3 checkpoint must miss its reference."""
    folder = GOLDEN / "llama3_rope_tied"
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    decoder = load_decoder(DecoderConfig.from_hf(raw), TensorFiles.open(folder), jnp.dtype("float32"))
    golden = load_file(folder / "reference.safetensors")
    references = (golden[name] for name in ("states", "normed", "logits"))
    with pytest.raises(AssertionError, match="layer"):
        assert_parity(decoder, golden["tokens"], golden["positions"], *references)
