"""A torch draft written from the format's description alone gives our logits on exports for SpecForge and SGLang.

It reads the two files and nothing of layerwave; the rotation comes from transformers, built from the exported config.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from layerwave.interop import export_draft
from layerwave.interop.check import chain_logits
from layerwave.targets.rope import Rope

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra")

LLAMA3 = Rope(5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)


class TorchDraft:
    """One step after the other over whole sequences, as engines do it: keys of all steps kept, one softmax."""

    def __init__(self, folder):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = json.loads((folder / "config.json").read_text())
        raw = load_file(folder / "model.safetensors")
        self.tensors = {name: torch.from_numpy(tensor) for name, tensor in raw.items()}
        self.rotary = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))

    def norm(self, x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.tensors[f"{name}.weight"] * x * scale

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T

    def fuse(self, slices):
        if self.config.get("fc_norm"):
            slices = [self.norm(s, f"fc_norm.{i}") for i, s in enumerate(slices)]
        joined = torch.cat(list(slices), dim=-1)
        return self.linear(self.norm(joined, "input_norm") if self.config.get("norm_before_fc") else joined, "fc")

    def layer(self, embedded, features, step, cache):
        """The midlayer on (T, d): queries see step 0 up to their slot, and their own slot of later steps."""
        length, size = len(features), self.config["head_dim"]
        inputs = torch.cat(
            [self.norm(embedded, "midlayer.input_layernorm"), self.norm(features, "midlayer.hidden_norm")], dim=-1
        )
        heads = (self.linear(inputs, f"midlayer.self_attn.{name}_proj").view(length, -1, size) for name in "qkv")
        q, k, v = (x.transpose(0, 1) for x in heads)
        cosine, sine = (x[0] for x in self.rotary(inputs, torch.arange(length)[None] + step))

        def turned(x):
            first, second = x.chunk(2, dim=-1)
            return x * cosine + torch.cat([-second, first], dim=-1) * sine

        cache.append((turned(k), v))
        keys, values = (torch.cat(x, dim=1) for x in zip(*cache, strict=True))
        seen = torch.cat([torch.ones(length, length).tril()] + [torch.eye(length)] * step, dim=1).bool()
        share = len(q) // len(keys)
        keys, values = keys.repeat_interleave(share, 0), values.repeat_interleave(share, 0)
        scores = (turned(q) @ keys.transpose(1, 2) / size**0.5).masked_fill(~seen, -torch.inf)
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(length, -1)
        hidden = features + self.linear(mixed, "midlayer.self_attn.o_proj")
        inputs = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(inputs, "midlayer.mlp.gate_proj"))
        return hidden + self.linear(gate * self.linear(inputs, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")

    def logits(self, embedding, tokens, states, steps):
        features, cache, found = self.fuse(states), [], []
        for step in range(steps):
            ahead = torch.nn.functional.pad(tokens[1 + step :], (0, 1 + step))
            out = self.layer(embedding[ahead], features, step, cache)
            normed = self.norm(out, "norm")
            found.append(self.linear(normed, "lm_head"))
            features = normed if self.config.get("norm_output") else out
        return torch.stack(found).numpy()


@pytest.mark.parametrize(
    ("consumer", "layers", "options"),
    [
        ("specforge", (1, 3, 4), {}),
        ("sglang", (2, 5), {"rope": LLAMA3}),
        ("sglang", (0, 2, 3, 4, 6), {"fc_norm": True, "norm_output": True}),
        ("sglang", (1, 3, 4), {"norm_before_fc": True, "rope": Rope(1e4, "linear", factor=4.0)}),
    ],
    ids=["plain", "llama3", "eagle31", "norm_before_fc"],
)
def test_torch_gives_our_logits(target, make_draft, tmp_path, consumer, layers, options):
    draft = make_draft(layers, **options)
    export_draft(draft, target, consumer, tmp_path / "out", dtype="float32")
    theirs = TorchDraft(tmp_path / "out")

    random = np.random.default_rng(11)
    tokens = random.integers(0, target.config.vocab_size, 60)
    states = random.standard_normal((len(layers), 60, target.config.hidden_size)).astype(np.float32)
    table = np.asarray(target.decoder.embed_tokens.embedding[...])
    # SGLang takes the embedding from the target, SpecForge from the file.
    embedding = theirs.tensors.get("embed_tokens.weight", torch.from_numpy(table.copy()))
    ours = chain_logits(
        draft, jnp.asarray(table), jnp.asarray(tokens, jnp.int32)[None], jnp.asarray(states)[:, None], steps=3
    )
    expected = theirs.logits(embedding, torch.from_numpy(tokens), torch.from_numpy(states), steps=3)
    for step in range(3):
        difference = np.abs(np.asarray(ours[step, 0]) - expected[step]).max()
        assert difference <= 1e-4 * np.abs(expected[step]).max(), f"step {step}: {difference}"
    # The steps must differ from each other for the later ones to test anything.
    assert np.abs(expected[1] - expected[0]).max() > 0.1 * np.abs(expected).max()
