"""What a broken or unsupported checkpoint says, and that saving and loading give the same parameters."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, DecoderConfig, load_target
from layerwave.targets.checkpoint import TensorFiles, load_decoder, save_decoder
from tests.targets.variants import GOLDEN

RAW = json.loads((GOLDEN / "qwen3" / "config.json").read_text())


def config_with(**changes):
    """The Qwen3 config with keys replaced; None removes a key."""
    return {key: value for key, value in (RAW | changes).items() if value is not None or key not in changes}


@pytest.fixture
def checkpoint(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen3" / name, tmp_path)
    return tmp_path


def load(folder):
    raw = json.loads((folder / "config.json").read_text())
    return load_decoder(DecoderConfig.from_hf(raw), TensorFiles.open(folder), jnp.float32)


def test_saved_parameters_load_equal(tmp_path):
    config = DecoderConfig.from_hf(RAW)
    decoder = Decoder(config, rngs=nnx.Rngs(3))
    save_decoder(decoder, tmp_path / "model.safetensors", jnp.float32)
    loaded = load_decoder(config, TensorFiles.open(tmp_path), jnp.float32)
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(decoder), nnx.state(loaded)))


def test_bfloat16_parameters_are_kept_in_bfloat16(checkpoint):
    decoder = load_decoder(DecoderConfig.from_hf(RAW), TensorFiles.open(checkpoint), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(decoder))} == {jnp.dtype("bfloat16")}
    output = decoder(jnp.ones((1, 4), jnp.int32))
    assert output.states.dtype == jnp.bfloat16
    assert decoder.logits(output.normed).dtype == jnp.float32


def test_both_spellings_of_rope_are_the_same():
    old = config_with(rope_parameters=None) | {"rope_theta": 5000000.0, "rope_scaling": None}
    assert DecoderConfig.from_hf(old) == DecoderConfig.from_hf(RAW)
    llama = json.loads((GOLDEN / "llama3_rope_tied" / "config.json").read_text())
    parameters = llama.pop("rope_parameters")
    theta = parameters.pop("rope_theta")
    renamed = {"type": parameters.pop("rope_type"), **parameters}
    old = llama | {"rope_theta": theta, "rope_scaling": renamed}
    assert (
        DecoderConfig.from_hf(old).rope
        == DecoderConfig.from_hf(
            llama | {"rope_parameters": parameters | {"rope_type": "llama3", "rope_theta": theta}}
        ).rope
    )


def test_every_fault_is_listed_in_one_error(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:5]
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(LayerwaveError) as caught:
        load(checkpoint)
    message = str(caught.value)
    assert "4 faults" in message
    assert "missing model.layers.1.mlp.up_proj.weight" in message
    assert "missing model.norm.weight" in message
    assert "unused model.layers.0.self_attn.q_proj.bias" in message
    assert "misshapen model.embed_tokens.weight: got (5, 32), expected (96, 32)" in message


def test_tied_checkpoint_may_repeat_its_head_but_not_contradict_it(tmp_path):
    shutil.copytree(GOLDEN / "qwen2_tied", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LayerwaveError, match="set tie_word_embeddings to false"):
        load(tmp_path)


def test_a_tied_head_without_the_embedding_is_listed_as_any_fault(tmp_path):
    shutil.copytree(GOLDEN / "qwen2_tied", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LayerwaveError, match=r"missing model\.embed_tokens\.weight; unused lm_head\.weight"):
        load(tmp_path)


def test_truncated_file(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LayerwaveError, match=r"model\.safetensors: not a readable safetensors file"):
        load(checkpoint)


def test_non_finite_tensor_is_named(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.2.mlp.gate_proj.weight"][0, 0] = np.nan
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(LayerwaveError, match=r"model\.layers\.2\.mlp\.gate_proj\.weight holds NaN"):
        load(checkpoint)


def test_index_that_names_an_absent_shard(checkpoint):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LayerwaveError, match=r"missing: model-00001-of-00002\.safetensors"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: gemma3, gemma3_text, llama, mistral"),
        ({"rms_norm_eps": None}, "the key rms_norm_eps is missing"),
        ({"rope_parameters": None}, "no rope_theta"),
        ({"rope_theta": 10000.0}, "two different values of rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "two different values of rope_type"),
        ({"rope_parameters": "linear"}, "must be objects"),
        ({"use_mrope": True}, "use_mrope True"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key heads"),
        ({"model_type": ["qwen3"]}, "is not supported"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "su"}},
            "rope type 'su' is not supported; supported: def",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, r"missing \['original_max_pos"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0, "beta": 1}},
            "not known .'beta'",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, r"missing \['factor'\]"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 is not supp",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": None},
            "the key max_window_layers is missing",
        ),
        ({"model_type": "llama", "sliding_window": 8}, "sliding_window is 8, but sliding-window attention is not"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "unknown keys hidden_activation .'gelu_pytorch_tanh'."),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported; supported: None"),
        ({"clip_qkv": 8.0}, r"unknown keys clip_qkv \(8.0\); they may change the forward pass"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is missing"),
        ({"layer_types": ["sliding_attention"] * 3}, "3 of 3 layer_types are sliding_attention, but a qwen3 with"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types .'linear_attention'. are not supported"),
        ({"layer_types": ["full_attention"] * 2}, "2 layer_types for 3 layers"),
    ],
)
def test_config_faults(changes, message):
    with pytest.raises(LayerwaveError, match=message):
        DecoderConfig.from_hf(config_with(**changes))


def test_bookkeeping_keys_are_read_over():
    noted = config_with(_name_or_path="a/b", _model_name_or_path="c", transformers_version="4.0", temperature=0.7)
    assert DecoderConfig.from_hf(noted) == DecoderConfig.from_hf(RAW)


REAL = {
    "Qwen2.5-0.5B": """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
        "vocab_size": 151936}""",
    "Llama-3.2-1B": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}""",
    "SmolLM2-135M": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041,
        "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
        "vocab_size": 49152}""",
}


@pytest.mark.parametrize("name", REAL)
def test_configs_as_they_are_published_are_read(name):
    raw = json.loads(REAL[name])
    config = DecoderConfig.from_hf(raw)
    assert config.num_heads * config.head_dim == config.hidden_size
    assert config.rope.theta == raw["rope_theta"]
    assert config.rope.factor == (raw.get("rope_scaling") or {}).get("factor", 1.0)


def test_untied_is_seen_from_the_tensors_where_the_config_is_silent():
    silent = config_with(tie_word_embeddings=None)
    assert DecoderConfig.from_hf(silent, has_head=False).tie_embeddings
    assert not DecoderConfig.from_hf(silent, has_head=True).tie_embeddings


@pytest.mark.parametrize(
    ("name", "message"),
    [(name, "neither a directory nor a hub id") for name in ("no/such/folder", "./no_such", "nothing")],
)
def test_target_that_is_not_there(name, message):
    with pytest.raises(LayerwaveError, match=message):
        load_target(name)


def test_target_without_tokenizer(checkpoint):
    with pytest.raises(LayerwaveError, match="no tokenizer"):
        load_target(checkpoint)


def test_target_without_config(tmp_path):
    shutil.copy(GOLDEN / "qwen3" / "model.safetensors", tmp_path)
    with pytest.raises(LayerwaveError, match=r"config\.json is missing"):
        load_target(tmp_path)


def test_unknown_dtype(checkpoint):
    with pytest.raises(LayerwaveError, match="float16"):
        load_target(checkpoint, dtype="float16")
