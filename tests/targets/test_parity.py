"""The decoder computes what torch transformers computes at 1,500 positions: golden files, and live where torch is."""

import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from layerwave.decoding import GenerationSettings, generate
from layerwave.targets import DecoderConfig
from layerwave.targets.checkpoint import TensorFiles, load_decoder
from layerwave.targets.rope import Rope
from tests.targets.variants import FAMILIES, GOLDEN, GOLDEN_VARIANTS, VARIANTS, build, random_tokens, reference


def load(folder, dtype="float32", **changes):
    tensors = TensorFiles.open(folder)
    raw = json.loads((folder / "config.json").read_text())
    config = DecoderConfig.from_hf(raw, has_head=tensors.has_head)
    return load_decoder(replace(config, **changes), tensors, jnp.dtype(dtype))


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


def assert_golden(decoder, variant):
    golden = load_file(GOLDEN / variant / "reference.safetensors")
    references = (golden[name] for name in ("states", "normed", "logits"))
    assert_parity(decoder, golden["tokens"], golden["positions"], *references)


@pytest.mark.parametrize("variant", GOLDEN_VARIANTS)
def test_golden(variant):
    assert_golden(load(GOLDEN / variant), variant)


@pytest.mark.parametrize("variant", ["qwen2_tied", "mistral_yarn_tied", "gemma3_text", "phi3_longrope", "qwen3_moe"])
def test_golden_generation(variant):
    """With a cache; torch had none. Windows are shorter than the continuations."""
    decoder, golden = load(GOLDEN / variant), load_file(GOLDEN / variant / "reference.safetensors")
    prompt = golden["tokens"][:8].tolist()
    assert greedy_with_cache(decoder, prompt, len(golden["greedy"])) == golden["greedy"].tolist()


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("llama3_rope_tied", {"rope": Rope(5e5)}),
        ("mistral_yarn_tied", {"sliding_window": 13}),
        ("gemma3_text", {"local_rope": None}),
        ("qwen3_moe", lambda config: {"experts": replace(config.experts, normalized=False)}),
        ("phi3_longrope", lambda config: {"rope": replace(config.rope, original_max_positions=2000)}),
    ],
)
def test_a_wrong_config_misses_the_reference(variant, changes):
    """Guards the golden test itself: what a fault would ignore must show."""
    if callable(changes):
        changes = changes(load(GOLDEN / variant).config)
    with pytest.raises(AssertionError, match="layer"):
        assert_golden(load(GOLDEN / variant, **changes), variant)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A variant's torch model, and the folder where it is saved."""
    pytest.importorskip("torch", reason="needs the parity extra")

    @cache
    def build_and_save(variant):
        model, folder = build(variant), tmp_path_factory.mktemp(variant)
        model.save_pretrained(folder)
        return model, folder

    return build_and_save


@pytest.mark.parity
@pytest.mark.parametrize("variant", VARIANTS)
def test_live(variant, built):
    import torch

    (model, folder), tokens = built(variant), random_tokens(seed=11)
    assert_parity(load(folder), tokens, slice(None), *reference(model, torch.tensor(tokens)))


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_live_shards(family, built, tmp_path):
    model, folder = built(FAMILIES[family])
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    single, sharded = load(folder), load(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(single), nnx.state(sharded)))


@pytest.mark.parity
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma3"])
def test_live_bfloat16(family, built):
    """As near to the same weights in float32 as torch's bfloat16 is.

    That of the median position: where two experts are about equally probable, rounding chooses one or the other.
    """
    import torch

    def error(of, exact):
        return np.median(np.linalg.norm(of - exact, axis=-1) / np.linalg.norm(exact, axis=-1))

    (model, folder), tokens = built(FAMILIES[family]), random_tokens(seed=11)
    ours = forward(load(folder, "bfloat16"), jnp.asarray(tokens, jnp.int32)[None])
    computed = {}
    for dtype in (torch.bfloat16, torch.float32):
        for parameter in model.parameters():  # and not its buffers: torch would round the rotary frequencies, too
            parameter.data = parameter.data.to(dtype)
        computed[dtype] = reference(model, torch.tensor(tokens))
    for of, theirs, exact in zip(ours, *computed.values(), strict=True):
        of = np.asarray(of).astype(np.float32).reshape(-1, *exact.shape[-2:])
        for layer in zip(of, theirs.reshape(of.shape), exact.reshape(of.shape), strict=True):
            assert error(layer[0], layer[2]) <= 1.1 * error(layer[1], layer[2])
