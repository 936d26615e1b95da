"""Exported drafts: every name, shape and key of the formats, bit-equal round trips, and refusals."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from layerwave.commands.export import Export
from layerwave.drafts import DraftVocabulary, initial_draft, save_draft
from layerwave.errors import LayerwaveError
from layerwave.interop import check_export, export_draft, import_draft
from layerwave.interop.check import chain_logits
from layerwave.targets import load_target
from layerwave.targets.rope import Rope

EVERY_COUNT = {1: (5,), 2: (2, 5), 3: (1, 3, 4), 5: (0, 2, 3, 4, 6)}
LLAMA3 = Rope(5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=128)


def parameters(draft):
    return {path: np.asarray(x) for path, x in jax.tree.leaves_with_path(nnx.state(draft.module, nnx.Param))}


def assert_same_draft(found, expected):
    assert found.config == expected.config
    np.testing.assert_array_equal(found.vocabulary.tokens, expected.vocabulary.tokens)
    assert (found.target_fingerprint, found.target_name) == (expected.target_fingerprint, expected.target_name)
    found, expected = parameters(found), parameters(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=str(path))


@pytest.mark.parametrize(
    ("consumer", "layers"),
    [
        *(("speculators", layers) for layers in EVERY_COUNT.values()),
        *(("sglang", layers) for size, layers in EVERY_COUNT.items() if size > 1),
        *((consumer, (1, 3, 4)) for consumer in ("vllm", "specforge", "sglang-deepseek", "sglang-gpt-oss")),
        ("vllm", (2, 5, 7)),
    ],
)
def test_round_trip_is_bit_equal(target, make_draft, tmp_path, consumer, layers):
    draft = make_draft(layers)
    exported = export_draft(draft, target, consumer, tmp_path / "out", dtype="float32")
    assert_same_draft(import_draft(tmp_path / "out", target), draft)
    check = check_export(draft, target, exported)
    assert check.difference == check.rounding == 0


@pytest.mark.parametrize(
    "options",
    [
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"rope": LLAMA3},
        {"rope": Rope(1e4, "linear", factor=2.0), "draft_vocab_size": 96},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("consumer", ["speculators", "sglang"])
def test_round_trip_of_options(target, make_draft, tmp_path, consumer, options):
    if consumer == "sglang":
        options = {key: value for key, value in options.items() if key != "norm_before_residual"}
    draft = make_draft((1, 3, 4), **options)
    export_draft(draft, target, consumer, tmp_path / "out", dtype="float32")
    assert_same_draft(import_draft(tmp_path / "out", target), draft)


def test_native_drafts_are_imported_as_well(target, make_draft, tmp_path):
    draft = make_draft((1, 3, 4))
    save_draft(draft, tmp_path / "draft")
    assert_same_draft(import_draft(tmp_path / "draft", target), draft)
    with pytest.raises(LayerwaveError, match="leave out"):
        import_draft(tmp_path / "draft", target, convention="output")


def test_bfloat16_costs_what_rounding_costs(target, make_draft, tmp_path):
    draft = make_draft((1, 3, 4))
    check = check_export(draft, target, export_draft(draft, target, "vllm", tmp_path / "out"))
    assert check.difference == 0
    assert 1e-4 < check.rounding < 0.05
    assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == jnp.bfloat16


EXPECTED = {
    "fc.weight": (32, 96),
    "midlayer.self_attn.q_proj.weight": (64, 64),
    "midlayer.self_attn.k_proj.weight": (32, 64),
    "midlayer.self_attn.v_proj.weight": (32, 64),
    "midlayer.self_attn.o_proj.weight": (32, 64),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.post_attention_layernorm.weight": (32,),
    "norm.weight": (32,),
    "lm_head.weight": (40, 32),
    "d2t": (40,),
    "t2d": (96,),
}
"""Names and shapes of SpecForge's format for V 96, Vd 40, d = dt = 32, I 48, four query and two key heads of 16."""


def written(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_sglang_format(target, make_draft, tmp_path):
    draft = make_draft((1, 3, 4), rope=LLAMA3)
    exported = export_draft(draft, target, "sglang", tmp_path / "out")
    config, tensors = written(tmp_path / "out")
    assert {name: tensor.shape for name, tensor in tensors.items()} == EXPECTED
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), np.arange(40) + tensors["d2t"])
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    own = config.pop("layerwave")
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": 96,
        "draft_vocab_size": 40,
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 5e5,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": 5e5},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "norm_before_residual": False,
        },
    }
    assert (own["ids_read_as"], own["layers"], own["consumer"]) == ("output", [1, 3, 4], "sglang")
    assert exported.ids_line == "ids 1,3,4 (outputs of layers) make sglang read layers 1,3,4 of 8"


def test_specforge_brings_the_embedding(target, make_draft, tmp_path):
    export_draft(make_draft((1, 3, 4)), target, "specforge", tmp_path / "out", dtype="float32")
    _, tensors = written(tmp_path / "out")
    assert {name: tensor.shape for name, tensor in tensors.items()} == EXPECTED | {"embed_tokens.weight": (96, 32)}
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], target.decoder.embed_tokens.embedding[...])


def test_speculators_format(target, make_draft, tmp_path):
    exported = export_draft(make_draft((1, 3, 7), norm_output=True), target, "vllm", tmp_path / "out")
    config, tensors = written(tmp_path / "out")
    names = {name.replace("midlayer", "layers.0"): shape for name, shape in EXPECTED.items()}
    assert {name: tensor.shape for name, tensor in tensors.items()} == names | {"embed_tokens.weight": (96, 32)}
    layer = config.pop("transformer_layer_config")
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == ("llama", 1, 96)
    assert (layer["rope_scaling"], layer["rope_parameters"]) == (None, {"rope_type": "default", "rope_theta": 5e4})
    assert config.pop("layerwave")["ids_read_as"] == "boundary"
    assert config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 8],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 8], "use_aux_hidden_state": True},
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": True,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "somebody/tiny-llama", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert exported.since == ("norm_output: vllm#46488",)
    assert exported.ids_line == "ids 2,4,8 (boundaries, inputs of layers) make vllm read layers 1,3,7 of 8"


def test_other_counts_than_three_are_said_to_sglang(target, make_draft, tmp_path):
    export_draft(make_draft((2, 5)), target, "sglang", tmp_path / "out")
    assert written(tmp_path / "out")[0]["num_aux_hidden_states"] == 2


@pytest.mark.parametrize(
    ("consumer", "layers", "options", "message"),
    [
        ("vllm", (2, 5), {}, "takes 3 layers, these are 2"),
        ("specforge", (1, 3, 4, 5), {}, "takes 3 layers, these are 4"),
        ("sglang", (1, 3, 7), {}, "layer 7 is the last.*since sglang#32334"),
        ("sglang-deepseek", (0, 3, 5), {}, "layer 0 is the first"),
        ("sglang", (5,), {}, "skips fc when the states read are as wide as the draft"),
        ("sglang", (1, 3, 4), {"norm_before_residual": True}, "norm_before_residual: it adds the attention"),
        ("specforge", (1, 3, 4), {"norm_before_fc": True}, "norm_before_fc"),
        ("llamacpp", (1, 3, 4), {}, "no export for 'llamacpp': choose from specforge"),
    ],
)
def test_what_a_consumer_cannot_run_is_refused(target, make_draft, tmp_path, consumer, layers, options, message):
    with pytest.raises(LayerwaveError, match=message):
        export_draft(make_draft(layers, **options), target, consumer, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_another_target_or_a_directory_in_use_is_refused(target, make_draft, tmp_path):
    draft = make_draft((1, 3, 4))
    other = dataclasses.replace(target, name="other", fingerprint="fedcba9876543210")
    with pytest.raises(LayerwaveError, match="made for the target 'somebody/tiny-llama'"):
        export_draft(draft, other, "sglang", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(LayerwaveError, match="not an empty directory"):
        export_draft(draft, target, "sglang", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_nothing_is_left_when_writing_fails(target, make_draft, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("layerwave.interop.export.save_file", full)
    with pytest.raises(LayerwaveError, match="No space left"):
        export_draft(make_draft((1, 3, 4)), target, "sglang", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_check_finds_a_tensor_that_was_changed(target, make_draft, tmp_path):
    draft = make_draft((1, 3, 4))
    exported = export_draft(draft, target, "sglang", tmp_path / "out", dtype="float32")
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    tail = np.frombuffer(bytes(content[-4096:]), np.float32)
    content[-4096:] = (tail * np.float32(1.5)).tobytes()
    file.write_bytes(bytes(content))
    with pytest.raises(LayerwaveError, match="differ"):
        check_export(draft, target, exported)


def test_first_step_of_the_chain_is_the_modules_own(target, make_draft):
    draft = make_draft((1, 3, 4))
    random = np.random.default_rng(5)
    tokens = jnp.asarray(random.integers(0, 96, (2, 9)), jnp.int32)
    states = jnp.asarray(random.standard_normal((3, 2, 9, 32)), jnp.float32)
    embedding = target.decoder.embed_tokens.embedding[...]
    first = chain_logits(draft, embedding, tokens, states, 1)[0]
    ahead = jnp.pad(tokens[:, 1:], [(0, 0), (0, 1)])
    np.testing.assert_allclose(first, draft.module(embedding[ahead], states), atol=1e-5)


def test_command(tmp_path, capsys):
    """`layerwave export` finds the target by the draft's own note of it."""
    mini = load_target("mini")
    vocabulary = DraftVocabulary.from_counts(np.arange(mini.config.vocab_size), 64)
    save_draft(initial_draft(mini, (1, 5, 8), vocabulary, jax.random.key(0)), tmp_path / "draft")
    Export(tmp_path / "draft", "vllm", tmp_path / "out", check=True).run()
    printed = capsys.readouterr().out
    assert "ids 2,6,9 (boundaries, inputs of layers) make vllm read layers 1,5,8 of 12" in printed
    assert "read back: logits within 0.0e+00" in printed  # the same parameters, so exactly the same
    Export(tmp_path / "draft", "sglang", tmp_path / "json", json=True).run()
    assert json.loads(capsys.readouterr().out)["ids"] == [1, 5, 8]
