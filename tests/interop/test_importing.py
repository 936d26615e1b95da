"""Drafts of other tools: each dialect is understood, and what a file leaves open or contradicts is refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from layerwave.errors import LayerwaveError
from layerwave.interop import export_draft, import_draft

LAYERS = (1, 3, 4)


@pytest.fixture(scope="module")
def draft(make_draft):
    return make_draft(LAYERS)


@pytest.fixture(scope="module")
def exported(target, draft, tmp_path_factory):
    """Folders that layerwave wrote, one a format, without its own key: what another tool could have written."""
    folders = {}
    for consumer in ("specforge", "speculators"):
        folders[consumer] = tmp_path_factory.mktemp(consumer) / "draft"
        export_draft(draft, target, consumer, folders[consumer], dtype="float32")
        path = folders[consumer] / "config.json"
        config = json.loads(path.read_text())
        del config["layerwave"]
        path.write_text(json.dumps(config))
    return folders


@pytest.fixture
def foreign(exported, tmp_path):
    """Gives a copy of a folder with its config and tensors changed by a function each."""

    def make(consumer="specforge", config=lambda raw: None, tensors=lambda named: named):
        folder = tmp_path / "foreign"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(exported[consumer], folder)
        raw = json.loads((folder / "config.json").read_text())
        config(raw)
        (folder / "config.json").write_text(json.dumps(raw))
        named = tensors(load_file(folder / "model.safetensors"))
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def setting(**changes):
    """Sets keys at the top level; None removes them."""

    def change(raw):
        for key, value in changes.items():
            raw.pop(key, None)
            if value is not None:
                raw[key] = value

    return change


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def assert_same_values(found, draft):
    assert found.config == draft.config
    for name in ("fc", "lm_head"):
        ours, theirs = (getattr(d.module, name) for d in (found, draft))
        leaf = "kernel" if name == "fc" else "embedding"
        np.testing.assert_array_equal(getattr(ours, leaf)[...], getattr(theirs, leaf)[...])


def test_speculators_documents_its_numbering(target, draft, foreign):
    assert_same_values(import_draft(foreign("speculators"), target), draft)
    with pytest.raises(LayerwaveError, match="read as boundary"):
        import_draft(foreign("speculators"), target, convention="output")


def test_specforge_ids_need_a_convention(target, draft, foreign):
    with pytest.raises(LayerwaveError, match="convention='output' or 'boundary'"):
        import_draft(foreign(), target)
    assert_same_values(import_draft(foreign(), target, convention="output"), draft)
    assert import_draft(foreign(), target, convention="boundary").config.layers == (0, 2, 3)


def modelopt(raw):
    """As NVIDIA ModelOpt's export fills its template: ids nested only, d2t the only table."""
    setting(eagle_aux_hidden_state_layer_ids=None, target_hidden_size=None, norm_before_residual=None)(raw)
    raw["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }


def test_modelopt_dialect(target, draft, foreign):
    folder = foreign(config=modelopt, tensors=without("t2d", "embed_tokens.weight"))
    assert_same_values(import_draft(folder, target, convention="output"), draft)


def test_automodel_dialect(target, draft, foreign):
    def rename(tensors):
        kept = ("lm_head.weight", "d2t", "t2d")
        return {
            name if name in kept else "model." + name.replace("midlayer.", "layers.0."): tensor
            for name, tensor in tensors.items()
        }

    folder = foreign(config=setting(torch_dtype=None), tensors=rename)
    assert_same_values(import_draft(folder, target, convention="output"), draft)


def test_safeailab_dialect_needs_the_layers(target, draft, foreign):
    silent = foreign(
        config=setting(eagle_aux_hidden_state_layer_ids=None, eagle_config=None, qkv_bias=False, bias=False)
    )
    with pytest.raises(LayerwaveError, match=r"no layer ids.*pass layers="):
        import_draft(silent, target)
    with pytest.raises(LayerwaveError, match="pass layers="):
        import_draft(silent, target, convention="output")
    assert_same_values(import_draft(silent, target, layers=LAYERS), draft)


def test_genuine_config_of_speculators(target, draft, foreign):
    """The keys that speculators 0.9.0 writes with save_pretrained."""
    layer = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 96,
    }
    folder = foreign("speculators")
    raw = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 40,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "speculators_config": {"algorithm": "eagle3"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": "5.19.0",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    assert_same_values(import_draft(folder, target), draft)
    raw["transformer_layer_config"] = layer | {"sliding_window": 2048, "layer_types": ["sliding_attention"]}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LayerwaveError, match="sliding-window attention is not supported"):
        import_draft(folder, target)


def test_a_full_vocabulary_needs_no_tables(target, make_draft, tmp_path):
    draft = make_draft(LAYERS, draft_vocab_size=96)
    export_draft(draft, target, "speculators", tmp_path / "out", dtype="float32")
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(import_draft(tmp_path / "out", target).vocabulary.tokens, np.arange(96))


def nested(**changes):
    return lambda raw: raw["eagle_config"].update(changes)


def naming(ids):
    """Writes the ids in both places."""

    def change(raw):
        raw["eagle_aux_hidden_state_layer_ids"] = raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids

    return change


def each(function):
    """Applies to every tensor that the function gives something for."""
    return lambda tensors: {name: function(name, tensor) for name, tensor in tensors.items()}


FAULTS = {
    "ids disagree": (nested(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), None, "contradicts itself.*keep one"),
    "ids do not ascend": (
        naming([4, 1, 3]),
        None,
        "do not ascend",
    ),
    "ids beyond the target": (
        naming([1, 3, 8]),
        None,
        "layer id 8 is out of range",
    ),
    "ids of another count": (setting(num_aux_hidden_states=4), None, "num_aux_hidden_states is 4, but 3 layers"),
    "fc of another count": (
        naming([1, 3]),
        None,
        r"misshapen fc.weight: got \(32, 96\), expected \(32, 64\)",
    ),
    "no rope_theta": (setting(rope_theta=None, rope_parameters=None), None, "no rope_theta"),
    "two rope_thetas": (setting(rope_theta=1e4), None, "two different values of rope_theta"),
    "no rms_norm_eps": (setting(rms_norm_eps=None), None, "rms_norm_eps is missing"),
    "further layers": (setting(num_hidden_layers=2), None, "num_hidden_layers is 2; drafts of one layer"),
    "attention bias": (setting(attention_bias=True), None, "biases in attention"),
    "qkv bias": (setting(qkv_bias=True), None, "qkv_bias is not false"),
    "bias of fc": (setting(bias=True), None, "bias is not false"),
    "bias tensor of fc": (None, lambda t: t | {"fc.bias": np.zeros(32, np.float32)}, "unused fc.bias"),
    "sliding window": (setting(sliding_window=2048), None, "sliding-window attention is not supported"),
    "qwen3 layer": (setting(model_type="qwen3"), None, "norms queries and keys"),
    "windowed layer": (setting(model_type="mistral", sliding_window=8), None, "a mistral layer is not a Llama layer"),
    "tied": (setting(tie_word_embeddings=True), None, "tie_word_embeddings is true"),
    "last state only": (nested(use_aux_hidden_state=False), None, "use_aux_hidden_state is not true"),
    "no last norm": (nested(use_last_layernorm=False), None, "use_last_layernorm is not true"),
    "unknown key": (setting(residual_scale=2.0), None, "unknown keys residual_scale"),
    "unknown nested key": (nested(eh_proj_before_attn=True), None, "eagle_config: unknown keys eh_proj_before_attn"),
    "quantised": (setting(quantization_config={"bits": 4}), None, "unknown keys quantization_config"),
    "no d2t": (None, without("d2t"), "d2t is missing, but the draft has 40 of the target's 96"),
    "d2t holds ids": (
        None,
        each(lambda name, tensor: tensor + np.arange(40) if name == "d2t" else tensor),
        "d2t does not hold offsets",
    ),
    "t2d of another vocabulary": (
        None,
        each(lambda name, tensor: np.roll(tensor, 1) if name == "t2d" else tensor),
        "do not agree",
    ),
    "missing tensor": (None, without("midlayer.hidden_norm.weight"), "missing midlayer.hidden_norm.weight"),
    "not finite": (
        None,
        each(lambda name, tensor: tensor * np.float32(np.nan) if name == "norm.weight" else tensor),
        "norm.weight holds NaN",
    ),
    "an embedding of its own": (
        None,
        each(lambda name, tensor: tensor * np.float32(2) if name == "embed_tokens.weight" else tensor),
        "not the embedding of the target",
    ),
    "norm flag without its tensor": (setting(fc_norm=True), None, "missing fc_norm.0.weight"),
    "another width": (setting(target_hidden_size=64), None, "target_hidden_size is 64"),
    "another vocabulary": (setting(vocab_size=100), None, "vocab_size is 100, the target's 96"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_specforge_files(target, foreign, fault):
    config, tensors, message = FAULTS[fault]
    folder = foreign(config=config or (lambda raw: None), tensors=tensors or (lambda named: named))
    with pytest.raises(LayerwaveError, match=message):
        import_draft(folder, target, convention="output")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (setting(norm_before_residual=None), "norm_before_residual is missing.*true in old versions"),
        (setting(speculators_model_type="dflash"), "type 'dflash'; only eagle3 is read"),
        (setting(transformer_layer_config=None), "only eagle3 is read"),
        (setting(target_norm="layer"), "unknown keys target_norm"),
        (setting(eagle_aux_hidden_state_layer_ids=None, eagle_config=None), "no layer ids"),
        (naming([0, 4, 5]), "boundary 0 is the embedding"),
    ],
)
def test_faults_of_speculators_files(target, foreign, config, message):
    with pytest.raises(LayerwaveError, match=message):
        import_draft(foreign("speculators", config=config), target)


def test_own_key_is_compared(target, draft, tmp_path):
    export_draft(draft, target, "sglang", tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    intact = json.loads(path.read_text())

    def refuse(message, **changes):
        path.write_text(json.dumps(intact | changes))
        with pytest.raises(LayerwaveError, match=message):
            import_draft(tmp_path / "out", target)

    ids = [2, 4, 5]
    eagle = intact["eagle_config"] | {"eagle_aux_hidden_state_layer_ids": ids}
    refuse("config.json was changed", eagle_aux_hidden_state_layer_ids=ids, eagle_config=eagle)
    refuse("layerwave lacks \\[", layerwave={"layers": [1, 3, 4]})
    refuse(
        "not those that the draft was exported with", layerwave=intact["layerwave"] | {"vocabulary_fingerprint": "0"}
    )
    path.write_text(json.dumps(intact))
    other = dataclasses.replace(target, fingerprint="fedcba9876543210")
    with pytest.raises(LayerwaveError, match="exported for the target 'somebody/tiny-llama'"):
        import_draft(tmp_path / "out", other)


def test_no_draft_there(target, tmp_path):
    with pytest.raises(LayerwaveError, match="cannot be read"):
        import_draft(tmp_path, target)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LayerwaveError, match="expected an object"):
        import_draft(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(LayerwaveError, match="is there; only safetensors"):
        import_draft(tmp_path, target)
