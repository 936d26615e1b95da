"""States that were stored give the calibration of the pass that made them; what files cannot say has to be said."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import layerwave as lw
from layerwave.calibration import GivenStates, calibrate, calibrate_states, read_conversations
from layerwave.calibration.step import states_step
from layerwave.calibration.tokens import bucket, encode
from layerwave.cli import main
from layerwave.errors import LayerwaveError
from layerwave.interop import StateFiles
from layerwave.kernels import token_entropy

SETTINGS = {"block": 8, "rho": 0.5, "max_length": 192, "replicates": 6, "sink_multiple": 3.0}
ROWS = [{"text": "the wave of states over depth " * n} for n in (4, 5, 6, 7, 8, 9)]
ROWS += [{"messages": [{"role": "user", "content": "zz"}, {"role": "assistant", "content": "lazy quiz " * 9}]}]
ROWS += [{"text": "short"}, {"text": "cut to the limit " * 30}, ROWS[0]]


@pytest.fixture(scope="module")
def stored(target):
    """Tokens, states of all layers, final-normed last states and entropies of every row, as another program would."""

    @jax.jit
    def forward(tokens):
        out = target.decoder(tokens)
        return out.states[:, 0], out.normed[0], token_entropy(out.normed[0], target.decoder.head_weight())

    rows = []
    for conversation in read_conversations(ROWS):
        ids = np.array(encode(target.tokenizer, conversation)[:512], np.int32)
        padded = np.zeros((1, bucket(len(ids), 512)), np.int32)
        padded[0, : len(ids)] = ids
        states, normed, entropies = jax.device_get(forward(padded))
        rows.append((ids, states[:, : len(ids)], normed[: len(ids)], entropies[: len(ids)]))
    return rows


def dump(folder, stored, *, entropies=True, post_norm=False, tokens=True):
    """One .safetensors a row: outputs of the layers."""
    folder.mkdir()
    for index, (ids, states, normed, entropy) in enumerate(stored):
        states = np.concatenate([states[:-1], normed[None]]) if post_norm else states
        tensors = {"states": np.ascontiguousarray(states)}
        tensors |= {"entropies": entropy} if entropies else {}
        tensors |= {"token_ids": ids} if tokens else {}
        save_file(tensors, folder / f"{index}.safetensors")
    return folder


def assert_same(ours, theirs):
    """To 1e-6 of the greatest number of each layer; what is counted, exactly."""
    for name in ("counts", "kept", "lengths", "sinks", "fingerprints"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    scale = np.abs(theirs.sums).max(axis=(0, 2, 3))[:, None, None]
    np.testing.assert_allclose(ours.sums / scale, theirs.sums / scale, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.curves, theirs.curves, rtol=1e-6, atol=2e-6)
    for name in ("grams", "centred"):
        pair = [getattr(one.replicates, name) for one in (ours, theirs)]
        np.testing.assert_allclose(*pair, rtol=0, atol=1e-6 * np.abs(pair[1]).max())
    np.testing.assert_array_equal(ours.sample_weights, theirs.sample_weights)
    assert ours.settings == theirs.settings
    for mine, other in zip(lw.stability(ours, 2).convergence, lw.stability(theirs, 2).convergence, strict=True):
        assert (mine.share, mine.samples, mine.blocks, mine.layers) == (
            other.share,
            other.samples,
            other.blocks,
            other.layers,
        )
        np.testing.assert_allclose(mine.score, other.score, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"rho": 0.3, "sinks": "drop", "final_state": "post_norm", "samples": 6}])
def test_stored_states_give_the_calibration_of_the_pass_that_made_them(target, stored, tmp_path, changes):
    direct = calibrate(target, ROWS, **SETTINGS | changes, token_sample=False)
    assert direct.sinks.sum() > 5
    final_state = direct.settings.final_state
    folder = dump(tmp_path / "states", stored, post_norm=final_state == "post_norm")
    files = StateFiles([folder], target.config.num_layers, numbering="output", final_state=final_state)
    ours = calibrate_states(files, **SETTINGS | changes)
    assert_same(ours, direct)
    assert ours.tokens is None
    assert (
        ours.tallies["samples numbered by output"] == len(direct.lengths) + ours.tallies["samples shorter than a block"]
    )
    for name in ("samples shorter than a block", "samples cut to max_length", "compilations"):
        assert ours.tallies[name] == direct.tallies[name]


def test_embedding_first_and_a_mask(target, stored, tmp_path):
    """`hidden_states` of Hugging Face, padded on the left: an embedding more, and tokens that are none."""
    direct = calibrate(target, ROWS[:4], **SETTINGS, final_state="post_norm", token_sample=False)
    rng = np.random.default_rng(0)
    for index, (ids, states, normed, entropy) in enumerate(stored[:4]):
        slices = np.concatenate([rng.normal(size=states[:1].shape), states[:-1], normed[None]]).astype(np.float32)
        pad = np.full((len(slices), 3, slices.shape[2]), 7, np.float32)
        np.save(tmp_path / f"s{index}.npy", np.concatenate([pad, slices], axis=1))
        np.save(tmp_path / f"s{index}.mask.npy", np.arange(len(ids) + 3) >= 3)
        np.save(tmp_path / f"s{index}.entropies.npy", np.concatenate([[9, 9, 9], entropy]))
        np.save(tmp_path / f"s{index}.token_ids.npy", np.concatenate([[0, 0, 0], ids]))
    files = StateFiles([tmp_path], target.config.num_layers, numbering="boundary", final_state="post_norm")
    assert len(files) == 4
    ours = calibrate_states(files, **SETTINGS)
    assert_same(ours, direct)
    assert (ours.tallies["masked tokens"], ours.tallies["samples numbered by boundary"]) == (12, 4)


def test_files_of_speculators(target, stored, tmp_path):
    direct = calibrate(target, ROWS[:4], **SETTINGS | {"rho": 1.0}, token_sample=False)
    N = target.config.num_layers
    for index, (ids, states, _, _) in enumerate(stored[:4]):
        tensors = {"hidden_states": np.ascontiguousarray(states.swapaxes(0, 1)), "token_ids": ids.astype(np.int64)}
        save_file(tensors, tmp_path / f"hs_{index}.safetensors")
    for ids in (range(1, N), range(1, N + 1)):  # as for speculators, and as for vLLM itself
        ours = calibrate_states(StateFiles([tmp_path], N, ids=ids), **SETTINGS | {"rho": 1.0})
        assert_same(ours, direct)
    with pytest.raises(LayerwaveError, match=r"does not say which layers it holds"):
        StateFiles([tmp_path], N)[0]
    with pytest.raises(LayerwaveError, match=r"numbering=output, final_state=None: leave both out"):
        StateFiles([tmp_path], N, ids=range(1, N), numbering="output")[0]
    with pytest.raises(LayerwaveError, match=r"hs_0.* lacks the outputs of 32 of 36 layers, .*layer 0 .*ids 1 … 35"):
        StateFiles([tmp_path], 36, ids=[3, 19, 34])[0]
    with pytest.raises(LayerwaveError, match=r"holds no entropies.*rho=0.5.*--rho 1"):
        calibrate_states(StateFiles([tmp_path], N, ids=range(1, N)), **SETTINGS)
    with pytest.raises(LayerwaveError, match=r"from before the final norm, but final_state is post_norm"):
        calibrate_states(StateFiles([tmp_path], N, ids=range(1, N)), rho=1.0, final_state="post_norm")


def test_a_last_slice_after_the_norm_is_found_where_both_are_stored(target, stored, tmp_path):
    ids, states, normed, _ = stored[0]
    slices = np.ascontiguousarray(np.concatenate([states, normed[None]]).swapaxes(0, 1))
    save_file({"hidden_states": slices, "token_ids": ids}, tmp_path / "hs_0.safetensors")
    N = target.config.num_layers
    header = {"format": "pt", "layerwave.layers": str(list(range(N)))}
    save_file({"hidden_states": slices, "token_ids": ids}, tmp_path / "hs_1.safetensors", header)
    with pytest.raises(LayerwaveError, match=r"one of them was taken after the final norm"):
        StateFiles([tmp_path], N)[1]


def test_without_token_ids_equal_states_have_equal_fingerprints(target, stored, tmp_path):
    folder = dump(tmp_path / "states", stored, tokens=False)
    files = StateFiles([folder], target.config.num_layers, numbering="output", final_state="pre_norm")
    ours, again = (calibrate_states(files, **SETTINGS) for _ in range(2))
    np.testing.assert_array_equal(ours.fingerprints, again.fingerprints)
    assert len(np.unique(ours.fingerprints)) == len(ours.fingerprints)  # the last row repeats the first
    with pytest.raises(LayerwaveError, match=r"9 of 18 samples stand in two"):
        lw.Calibration.merge([ours, again])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_float_types(stored, tmp_path, dtype):
    _, states, _, _ = stored[0]
    save_file({"states": np.ascontiguousarray(states.astype(dtype))}, tmp_path / "0.safetensors")
    files = StateFiles([tmp_path / "0.safetensors"], len(states), numbering="output", final_state="pre_norm")
    pool = calibrate_states(files, block=8, rho=1.0).states
    exact = calibrate_states([GivenStates(states, "pre_norm", "output", "here")], block=8, rho=1.0).states
    np.testing.assert_allclose(pool, exact, rtol=0, atol=0.02 * np.abs(exact).max())


def test_one_compilation_for_each_length_bucket(tmp_path):
    rng = np.random.default_rng(2)
    samples = [
        GivenStates(rng.normal(size=(3, T, 5)).astype(np.float32), "pre_norm", "output", f"{T}")
        for T in range(20, 256, 9)
    ]
    states_step.clear_cache()
    ours = calibrate_states(samples, block=8, rho=1.0)
    assert states_step._cache_size() == ours.tallies["compilations"] == 3  # 64, 128, 256


def test_the_order_of_files_is_that_of_their_numbers(tmp_path):
    for number in (10, 9, 1):
        np.save(tmp_path / f"hs_{number}.npy", np.zeros((2, 3, 4), np.float32))
    assert [file.name for file in StateFiles([tmp_path], 2).files] == ["hs_1.npy", "hs_9.npy", "hs_10.npy"]


def states_of(**changes):
    rng = np.random.default_rng(1)
    return {"states": rng.normal(size=(3, 20, 5)).astype(np.float32)} | changes


BAD = np.full((3, 20, 5), np.nan, np.float32)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (states_of(), {"numbering": None}, r"cannot say numbering \(output: .*boundary: embedding first\)"),
        (states_of(), {"final_state": None}, r"cannot say final_state \(pre_norm or post_norm"),
        (states_of(), {"ids": [1, 2]}, r"plain array, which has all layers in order: leave ids out"),
        (states_of(), {"numbering": "boundary"}, r"shape \(3, 20, 5\), but 3 layers numbered by boundary make \(4,"),
        (states_of(states=np.zeros((20, 5), np.float32)), {}, r"shape \(20, 5\)"),
        (states_of(states=np.zeros((3, 20, 5), np.int64)), {}, r"int64, expected floating-point"),
        (states_of(states=BAD), {}, r"a.safetensors: states hold NaN or infinity"),
        (states_of(entropies=np.full(20, np.inf)), {}, r"entropies hold NaN or infinity"),
        (states_of(entropies=np.zeros(19)), {}, r"entropies has shape \(19,\), but the states have 20 tokens"),
        (states_of(mask=np.full(20, 2)), {}, r"mask holds more than 0 and 1"),
        (states_of(token_ids=np.zeros(20)), {}, r"token_ids are float64, expected whole numbers"),
        (states_of(entropy=np.zeros(20)), {}, r"holds entropy, states: expected hs_"),
        ({}, {}, r"holds nothing"),
    ],
)
def test_faults_of_plain_arrays(tmp_path, tensors, options, message):
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(LayerwaveError, match=message):
        StateFiles([tmp_path], 3, **{"numbering": "output", "final_state": "pre_norm"} | options)[0]


def test_faults_of_files(tmp_path):
    with pytest.raises(LayerwaveError, match=r"is no file and no folder of any"):
        StateFiles([tmp_path / "none"], 3)
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY no")
    (tmp_path / "b.safetensors").write_bytes(b"no")
    np.save(tmp_path / "c.npy", np.array([{}]), allow_pickle=True)
    for index in range(3):
        with pytest.raises(LayerwaveError, match=r"cannot be read"):
            StateFiles([tmp_path], 3, numbering="output", final_state="pre_norm")[index]


def given(seed=0, shape=(3, 20, 5), final_state="pre_norm", dtype=np.float32):
    states = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    return GivenStates(states, final_state, "output", f"sample {seed}")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (given(1, shape=(4, 20, 5)), r"differ in layers"),
        (given(1, shape=(3, 20, 6)), r"differ in features"),
        (given(1, final_state="post_norm"), r"differ in final state"),
        (given(1, dtype=ml_dtypes.bfloat16), r"differ in dtype"),
    ],
)
def test_samples_have_to_be_alike(other, message):
    with pytest.raises(LayerwaveError, match=message):
        calibrate_states([given(), other], block=4, rho=1.0)


def test_faults_of_samples():
    with pytest.raises(LayerwaveError, match="at least one"):
        calibrate_states([])
    with pytest.raises(LayerwaveError, match=r"every sample is shorter than a block of 32 .*1 samples, .* of 20"):
        calibrate_states([given()], rho=1.0)
    zero = given().states.copy()
    zero[1] = 0
    with pytest.raises(LayerwaveError, match=r"layer 1 are all zero"):
        calibrate_states([GivenStates(zero, "pre_norm", "output", "here")], rho=1.0, block=4)
    with pytest.raises(LayerwaveError, match=r"unknown setting 'roh'"):
        calibrate_states([given()], roh=1)


def test_the_command_then_select(stored, tmp_path, capsys):
    folder, out = dump(tmp_path / "states", stored), tmp_path / "cal.safetensors"
    args = ["calibrate", "--states", folder, "--num-layers", 4, "--numbering", "output", "--out", out, "--block", 8]
    main([*map(str, args), "--stored-final-state", "post_norm", "--name", "tiny"])
    captured = capsys.readouterr()
    assert "no predicted acceptance" in captured.err
    assert "last state: post_norm" in captured.err
    calibration = lw.Calibration.load(out)
    assert (calibration.target_name, calibration.settings.final_state) == ("tiny", "post_norm")
    assert calibration.settings.token_sample is False
    main(["select", str(out), "--size", "2", "--json"])
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 2
    with pytest.raises(SystemExit):
        main(["select", str(out), "--criterion", "acceptance", "--size", "1"])
    assert "token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--out c --states s", "--num-layers"),
        ("mini x.jsonl --out c --states s --num-layers 3", "in their place"),
        ("mini x.jsonl --out c --num-layers 3", "no --states"),
        ("mini --out c", "TARGET and CONVERSATIONS"),
        ("mini x.jsonl", "--out"),
        ("--out c --states s --num-layers 3 --ids 1-x", "ids '1-x'"),
        ("--out c --states s --num-layers 3 --dtype bfloat16", "--states with options of a target"),
        ("--out c --states s --num-layers 3 --distributed", "--states with options of a target"),
    ],
)
def test_the_command_refuses(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    with pytest.raises(SystemExit) as exit_:
        main(["calibrate", *args.split()])
    assert exit_.value.code == 2
    assert re.search(re.escape(message), capsys.readouterr().err)
