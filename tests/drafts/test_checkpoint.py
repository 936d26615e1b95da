"""A draft on disk: names and shapes of its tensors, equal after loading, and what a damaged one says."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from layerwave.drafts import Draft, DraftConfig, DraftVocabulary, draft_tensors, load_draft, save_draft
from layerwave.errors import LayerwaveError
from layerwave.targets.rope import Rope
from tests.drafts.test_unroll import CONFIG, LAYERS, VD, D, V, random_module

VOCABULARY = DraftVocabulary(np.sort(np.random.default_rng(1).choice(V, VD, replace=False)), V)


def draft_of(config=CONFIG, vocabulary=VOCABULARY):
    return Draft(config, nnx.merge(*random_module(config)), vocabulary, "f" * 64, "some/target")


def same_parameters(first, second):
    return jax.tree.all(jax.tree.map(np.array_equal, nnx.state(first.module), nnx.state(second.module)))


@pytest.fixture
def folder(tmp_path):
    save_draft(draft_of(), tmp_path / "draft")
    return tmp_path / "draft"


def rewrite(folder, **changes):
    """Replaces tensors of a saved draft; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")


def reconfigure(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize("m", LAYERS)
@pytest.mark.parametrize("option", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
def test_loaded_equals_saved(tmp_path, m, option):
    config = replace(CONFIG, layers=LAYERS[m], rope=Rope(1e4, "llama3", 8.0, 1.0, 4.0, 32), **{option: True})
    draft = draft_of(config)
    save_draft(draft, tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft")
    assert loaded.config == config
    assert same_parameters(loaded, draft)
    assert loaded.vocabulary.fingerprint == draft.vocabulary.fingerprint
    assert (loaded.target_name, loaded.target_fingerprint) == ("some/target", "f" * 64)


def test_names_and_shapes_are_those_of_published_checkpoints():
    """eagle/SpecForge names; query heads 4, key heads 2, head_dim 8, MLP 20, three layers of width 12."""
    expected = {
        "fc.weight": (D, 3 * D),
        "midlayer.self_attn.q_proj.weight": (32, 2 * D),
        "midlayer.self_attn.k_proj.weight": (16, 2 * D),
        "midlayer.self_attn.v_proj.weight": (16, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, 32),
        "midlayer.mlp.gate_proj.weight": (20, D),
        "midlayer.mlp.up_proj.weight": (20, D),
        "midlayer.mlp.down_proj.weight": (D, 20),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        "norm.weight": (D,),
        "lm_head.weight": (VD, D),
        "d2t": (VD,),
        "t2d": (V,),
    }
    tensors = draft_tensors(draft_of())
    assert {name: x.shape for name, x in tensors.items()} == expected
    assert tensors["d2t"].dtype == np.int64
    assert tensors["t2d"].dtype == bool
    sliced = draft_tensors(draft_of(replace(CONFIG, fc_norm=True)))
    assert {name: sliced[name].shape for name in sliced.keys() - expected} == {
        f"fc_norm.{i}.weight": (D,) for i in range(3)
    }
    joined = draft_tensors(draft_of(replace(CONFIG, norm_before_fc=True)))
    assert {name: joined[name].shape for name in joined.keys() - expected} == {"input_norm.weight": (3 * D,)}


def test_bfloat16_file_and_bfloat16_module(tmp_path):
    draft = draft_of()
    save_draft(draft, tmp_path / "draft", dtype=jnp.bfloat16)
    rounded = load_draft(tmp_path / "draft")
    for loaded, value in zip(*(jax.tree.leaves(nnx.state(d.module)) for d in (rounded, draft)), strict=True):
        np.testing.assert_array_equal(loaded, value.astype(jnp.bfloat16).astype(jnp.float32))
    assert load_draft(tmp_path / "draft", dtype=jnp.bfloat16).module.dtype == jnp.bfloat16


def test_a_draft_is_replaced_but_nothing_else_is(folder):
    other = draft_of(replace(CONFIG, layers=(2, 3, 5)))
    save_draft(other, folder)
    assert load_draft(folder).config.layers == (2, 3, 5)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(LayerwaveError, match=r"holds other files \(notes\.txt\)"):
        save_draft(draft_of(), folder)
    assert load_draft(folder).config.layers == (2, 3, 5)
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


def test_a_save_that_fails_leaves_what_was_there(folder, monkeypatch):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("layerwave.drafts.checkpoint.save_file", fails)
    with pytest.raises(LayerwaveError, match="No space left"):
        save_draft(draft_of(replace(CONFIG, layers=(2, 3, 5))), folder)
    assert load_draft(folder).config == CONFIG
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


def test_every_fault_is_listed_in_one_error(folder):
    extra = np.zeros((V, D), np.float32)
    rewrite(folder, **{"norm.weight": None, "embed_tokens.weight": extra, "fc.weight": np.zeros((D, D), np.float32)})
    with pytest.raises(LayerwaveError) as caught:
        load_draft(folder)
    for part in ("3 faults", "missing norm.weight", "unused embed_tokens.weight", "misshapen fc.weight: got (12, 12)"):
        assert part in str(caught.value)


def test_a_stale_vocabulary_is_refused(folder):
    """Tables of another run, which agree with each other and fit: only the fingerprint tells."""
    stale = DraftVocabulary(np.arange(VD), V)
    rewrite(folder, d2t=stale.d2t, t2d=stale.t2d)
    with pytest.raises(LayerwaveError, match=f"{VOCABULARY.fingerprint[:12]}.*{stale.fingerprint[:12]}"):
        load_draft(folder)


def test_tables_that_do_not_agree_are_refused(folder):
    rewrite(folder, t2d=np.roll(VOCABULARY.t2d, 1))
    with pytest.raises(LayerwaveError, match="do not agree"):
        load_draft(folder)


def test_nan_is_named(folder):
    rewrite(folder, **{"norm.weight": np.full(D, np.nan, np.float32)})
    with pytest.raises(LayerwaveError, match=r"norm\.weight holds NaN"):
        load_draft(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": None}, "schema None and version 1, expected 'layerwave.draft' and 1"),
        ({"version": 2}, "and version 2, expected"),
        ({"target": {}}, "is damaged"),
        ({"config": {"layers": [1]}}, "the draft's config lacks .*'fc_norm'"),
        ({"config": CONFIG.to_json() | {"window": 2048}}, r"has the unknown \['window'\]"),
        ({"config": CONFIG.to_json() | {"rope": {"base": 1e4}}}, "cannot be read"),
    ],
)
def test_config_that_cannot_be_read(folder, changes, message):
    reconfigure(folder, **changes)
    with pytest.raises(LayerwaveError, match=message):
        load_draft(folder)


def test_nothing_there(tmp_path):
    with pytest.raises(LayerwaveError, match=r"config\.json is missing"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(LayerwaveError, match="cannot be read"):
        load_draft(tmp_path)


def test_config_as_json_and_back():
    assert DraftConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG
