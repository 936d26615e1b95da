"""Stored hidden states: what is read is what was written, and a norm applied twice or never is found."""

import fractions
import gzip

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from layerwave.errors import LayerwaveError
from layerwave.interop import (
    HiddenStates,
    check_final_state,
    read_specforge,
    read_speculators,
    write_speculators,
)

LAYERS = (1, 3, 4)


@pytest.fixture(scope="module")
def sample(target):
    tokens = np.arange(3, 23, dtype=np.int64)
    output = nnx.jit(lambda decoder, ids: decoder(ids))(target.decoder, jnp.asarray(tokens, jnp.int32)[None])
    states = np.asarray(output.states[:, 0])
    sample = HiddenStates(tokens, states[list(LAYERS)], states[-1], LAYERS, "pre_norm")
    return sample, np.asarray(output.normed[0]), np.asarray(target.decoder.logits(output.normed[0]))


def assert_same(found, expected):
    assert (found.layers, found.final_state) == (expected.layers, expected.final_state)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.states, expected.states)
    np.testing.assert_array_equal(found.final, expected.final)


def test_speculators_file_as_documented(sample, tmp_path):
    """hidden_states (T, m + 1, D) with the pre-norm final state in the last slot, under boundary ids."""
    given, _, _ = sample
    stacked = np.stack([given.states[0], given.states[1], given.states[2], given.final], axis=1)
    tensors = {"hidden_states": np.ascontiguousarray(stacked), "token_ids": given.tokens}
    save_file(tensors, tmp_path / "hs_0.safetensors")
    assert_same(read_speculators(tmp_path / "hs_0.safetensors", 8, [2, 4, 5]), given)
    write_speculators(given, tmp_path / "hs_1.safetensors")
    written = load_file(tmp_path / "hs_1.safetensors")
    np.testing.assert_array_equal(written["hidden_states"], stacked)
    assert written["token_ids"].dtype == np.int64


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_round_trip(sample, tmp_path, dtype):
    given, _, _ = sample
    given = HiddenStates(given.tokens, given.states.astype(dtype), given.final.astype(dtype), LAYERS, "pre_norm")
    write_speculators(given, tmp_path / "hs_0.safetensors")
    assert_same(read_speculators(tmp_path / "hs_0.safetensors", 8), given)
    with pytest.raises(LayerwaveError, match=r"holds layers \[1, 3, 4\], the ids given name \[1, 3, 5\]"):
        read_speculators(tmp_path / "hs_0.safetensors", 8, [2, 4, 6])


def test_faults_of_speculators_files(sample, tmp_path):
    given, normed, _ = sample
    path = tmp_path / "hs_0.safetensors"
    save_file({"hidden_states": np.zeros((20, 4, 32), np.float32), "token_ids": given.tokens}, path)
    with pytest.raises(LayerwaveError, match="does not say which layers"):
        read_speculators(path, 8)
    with pytest.raises(LayerwaveError, match="2 layers and 20 tokens, but states of shape"):
        read_speculators(path, 8, [2, 4])
    save_file({"hidden_states": np.full((20, 4, 32), np.nan, np.float32), "token_ids": given.tokens}, path)
    with pytest.raises(LayerwaveError, match="NaN"):
        read_speculators(path, 8, [2, 4, 5])
    save_file({"hidden_states": np.zeros((20, 128), np.float32), "token_ids": given.tokens}, path)
    with pytest.raises(LayerwaveError, match="expected"):
        read_speculators(path, 8, [2, 4, 5])
    path.write_bytes(b"no")
    with pytest.raises(LayerwaveError, match="not a hidden-state file of speculators"):
        read_speculators(path, 8, [2, 4, 5])
    with pytest.raises(LayerwaveError, match="applies the final norm itself"):
        write_speculators(HiddenStates(given.tokens, given.states, normed, LAYERS, "post_norm"), path)


def test_specforge_needs_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(LayerwaveError, match="torch file: pip install torch"):
        read_specforge(tmp_path / "data_0.ckpt", 8, [1, 3, 4])


@pytest.mark.parity
@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz"])
def test_specforge_file(sample, tmp_path, suffix):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    given, normed, _ = sample
    mask = torch.arange(20) % 3
    path = tmp_path / f"data_0{suffix}"
    with gzip.open(path, "wb") if suffix.endswith(".gz") else path.open("wb") as file:
        joined = torch.cat([torch.tensor(states) for states in given.states], dim=-1)
        raw = {"input_ids": torch.tensor(given.tokens), "loss_mask": mask, "hidden_state": torch.tensor(normed)[None]}
        torch.save({**raw, "aux_hidden_state": joined[None]}, file)
    found = read_specforge(path, 8, [1, 3, 4])
    assert_same(found, HiddenStates(given.tokens, given.states, normed, LAYERS, "post_norm"))
    np.testing.assert_array_equal(found.loss_mask, mask.numpy() > 0)
    with pytest.raises(LayerwaveError, match=r"20 tokens and 2 ids"):
        read_specforge(path, 8, [1, 3])


@pytest.mark.parity
def test_specforge_file_that_would_run_code_is_refused(tmp_path):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    torch.save({"input_ids": fractions.Fraction(1, 3)}, tmp_path / "data_0.ckpt")
    with pytest.raises(LayerwaveError, match="not a hidden-state file of SpecForge"):
        read_specforge(tmp_path / "data_0.ckpt", 8, [1, 3, 4])


def test_head_reproduces_logits(sample, target):
    given, normed, logits = sample
    after = HiddenStates(given.tokens, given.states, normed, LAYERS, "post_norm")
    for expected in (logits, logits.argmax(-1)):
        check_final_state(given, target.decoder, expected)
        check_final_state(after, target.decoder, expected)


def test_a_norm_missing_or_applied_twice_is_found(sample, target):
    given, normed, logits = sample
    doubled = HiddenStates(given.tokens, given.states, normed, LAYERS, "pre_norm")
    missing = HiddenStates(given.tokens, given.states, given.final, LAYERS, "post_norm")
    for wrong, right in ((doubled, "post_norm"), (missing, "pre_norm")):
        with pytest.raises(LayerwaveError, match=f"reproduced when it is read as {right}"):
            check_final_state(wrong, target.decoder, logits)
    earlier = HiddenStates(given.tokens, given.states, given.states[-1], LAYERS, "pre_norm")
    with pytest.raises(LayerwaveError, match="another layer"):
        check_final_state(earlier, target.decoder, logits.argmax(-1))
