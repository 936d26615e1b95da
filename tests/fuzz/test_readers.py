"""Whatever a file holds, a reader takes it or says what is wrong with it; sizes it claims are never believed.

LAYERWAVE_FUZZ_EXAMPLES=5000 spoils each file so many times, at random. What the coverage-guided fuzzer (run.py) and
these found lies as examples beside the tests.
"""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from layerwave.calibration import Calibration
from layerwave.commands.jobs import read_jobs
from layerwave.errors import LayerwaveError
from layerwave.files.reading import parse_json, shown, typed
from layerwave.interop import StateFiles
from layerwave.selection import Selection
from layerwave.targets.checkpoint import TensorFiles, load_decoder
from layerwave.targets.config import DecoderConfig
from tests.fuzz.readers import GOLDEN, JUNK, B, D, N, all_readers, decoded, spoiled

MANY = int(os.environ.get("LAYERWAVE_FUZZ_EXAMPLES", "0"))
SPOILING = settings(max_examples=MANY or 8, derandomize=not MANY, deadline=None, database=None)
CHANGES = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, len(JUNK) + 1)), min_size=1, max_size=3)
NAMES = [
    "rows.jsonl", "rows.json", "prompts.jsonl", "questions.jsonl", "selection.json", "evaluation.json", "out.partial",
    "metrics.jsonl", "run.json", "jobs.yaml", "cal.safetensors", "given.safetensors", "states.safetensors",
    "hs_0.safetensors", "states.npy", "model.safetensors", "model.safetensors.index.json", "draft.json", "foreign.json",
    *sorted(f"{folder.name}.json" for folder in GOLDEN.iterdir()),
]  # fmt: skip


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    found = {reader.name: reader for reader in all_readers(tmp_path_factory.mktemp("made"))}
    assert found.keys() == set(NAMES)
    return found


@pytest.fixture(params=NAMES)
def reader(request, readers):
    return readers[request.param]


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spoiled")


def test_the_file_itself_is_taken(reader, folder):
    assert reader.attempt(reader.content, folder) is None


def test_values_in_the_place_of_others(reader, folder):
    @SPOILING
    @given(CHANGES)
    def spoil(changes):
        message = reader.attempt(spoiled(reader, changes), folder)
        assert message is None or message

    spoil()


def test_any_bytes(reader, folder):
    @SPOILING
    @given(st.binary(max_size=64), st.integers(0, 2**16))
    @example(b"", 0)
    @example(b"[" * 64, 0)
    @example(b"\xff\xfe{", 0)
    @example(b'{"x": ' + b"9" * 5000 + b"}", 0)
    @example(b"\xff" * 8, 0)
    def spoil(content, place):
        start = place % (len(reader.content) + 1)
        reader.attempt(content, folder)
        reader.attempt(reader.content[:start], folder)
        reader.attempt(reader.content[:start] + content + reader.content[start + len(content) :], folder)

    spoil()


def test_the_corpus_of_the_fuzzer(readers, tmp_path):
    """Inputs that showed a fault, and those that together reach all that half an hour of guided fuzzing reached."""
    found = tuple(readers.values())
    for number in range(len(found)):
        (tmp_path / str(number)).mkdir()
    for line in (Path(__file__).parent / "corpus.txt").read_text().split():
        number, content = decoded(found, bytes.fromhex(line))
        found[number].attempt(content, tmp_path / str(number))


def test_nested_without_end(reader, folder):
    """Deeper than Python's stack, in JSON, YAML, a header of NumPy or of safetensors."""
    deep = b"[" * 10_000
    header = b'{"a": ' + deep
    for content in (
        deep + b"\n",
        b'{"a":' * 10_000 + b"\n",
        struct.pack("<Q", len(header)) + header + b"\n",
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + deep[:9000] + b"\n",
    ):
        assert reader.attempt(content, folder)


def tensor_file(tensors, data=b"", metadata=None):
    """A safetensors file whose header says what it is told to."""
    header = {name: {"dtype": d, "shape": s, "data_offsets": o} for name, (d, s, o) in tensors.items()}
    header |= {"__metadata__": metadata} if metadata else {}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


LIES = {
    "a shape larger than the file": tensor_file({"x": ("F32", [2**20, 2**20], [0, 8])}, bytes(8)),
    "a shape that overflows": tensor_file({"x": ("F32", [2**40, 2**40], [0, 8])}, bytes(8)),
    "offsets beyond the end": tensor_file({"x": ("F32", [2**20], [0, 2**22])}, bytes(8)),
    "tensors that overlap": tensor_file({"x": ("F32", [2], [0, 8]), "y": ("F32", [2], [4, 12])}, bytes(12)),
    "one place for two tensors": tensor_file({"x": ("F32", [2], [0, 8]), "y": ("F32", [2], [0, 8])}, bytes(8)),
    "a gap": tensor_file({"x": ("F32", [2], [4, 12])}, bytes(12)),
    "nothing of any size": tensor_file({"x": ("F32", [0, 2**62], [0, 0])}),
    "nothing of a size that NumPy allows": tensor_file({"x": ("F32", [0, 2**50], [0, 0])}),
    "more axes than NumPy has": tensor_file({"x": ("F32", [1] * 70, [0, 4])}, bytes(4)),
    "a dtype that NumPy lacks": tensor_file({"x": ("F8_E4M3", [8], [0, 8])}, bytes(8)),
    "complex numbers": tensor_file({"x": ("C64", [1], [0, 8])}, bytes(8)),
    "a dtype that nobody knows": tensor_file({"x": ("X1", [8], [0, 8])}, bytes(8)),
    "a header longer than the file": struct.pack("<Q", 2**60) + b"{}",
    "a header that ends early": struct.pack("<Q", 99) + b"{}",
    "no header": b"",
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["cal.safetensors", "states.safetensors", "hs_0.safetensors", "model.safetensors"])
def test_headers_that_lie_are_refused_before_anything_is_allocated(readers, folder, name, lie):
    tracemalloc.start()
    try:
        assert readers[name].attempt(LIES[lie], folder)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


GIANT = 2**31 - 1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10_000},
        {"num_hidden_layers": GIANT},
        {"num_hidden_layers": 10**30},
        {"vocab_size": GIANT},
        {"hidden_size": GIANT - 1, "head_dim": 16},
        {"intermediate_size": GIANT},
        {"vocab_size": GIANT, "hidden_size": GIANT, "intermediate_size": GIANT},
        {"num_attention_heads": 2**30, "num_key_value_heads": 2**30},
        {"model_type": "mixtral", "num_local_experts": GIANT, "num_experts_per_tok": 2, "sliding_window": None},
    ],
)
def test_a_config_of_any_size_costs_no_memory(tmp_path, changes):
    """Sizes in config.json are believed only as far as the tensors bear them out."""
    raw = json.loads((GOLDEN / "qwen3" / "config.json").read_text()) | changes
    raw.pop("layer_types", None)
    tracemalloc.start()
    try:
        with pytest.raises(LayerwaveError, match=r"config\.json"):
            load_decoder(DecoderConfig.from_hf(raw), TensorFiles.open(GOLDEN / "qwen3"), np.float32)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": "false"}, "attention_bias is 'false', expected true or false"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', expected a number"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"head_dim": 15}, "heads of 15 channels"),
        ({"head_dim": "16"}, "head_dim is '16'"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', expected a list"),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4', expected a number"),
        ({"rope_parameters": {"rope_theta": 0.0}}, r"rope_theta is 0\.0"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta is inf"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}}, "factor is 0"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
            "low_freq_factor is 4.0, high_freq_factor 4.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0,
                                 "original_max_position_embeddings": -1}},
            "original_max_position_embeddings is -1",
        ),
    ],
)  # fmt: skip
def test_config_values_of_the_wrong_kind_are_named(changes, message):
    raw = json.loads((GOLDEN / "qwen3" / "config.json").read_text()) | changes
    with pytest.raises(LayerwaveError, match=message):
        DecoderConfig.from_hf(raw)


def test_a_checkpoint_of_whole_numbers_is_not_taken_for_weights(tmp_path):
    tensors = load_file(GOLDEN / "qwen3" / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = DecoderConfig.from_hf(json.loads((GOLDEN / "qwen3" / "config.json").read_text()))
    with pytest.raises(LayerwaveError, match=r"model\.norm\.weight is int8, expected floating-point"):
        load_decoder(config, TensorFiles.open(tmp_path), np.float32)


@pytest.mark.parametrize(
    "shape", [(N, 2**40, D), (2**60,), (N, 8, 2**58), (0, 2**62)], ids=["tokens", "one axis", "features", "nothing"]
)
def test_an_array_larger_than_its_file(tmp_path, shape):
    header = f"{ {'descr': '<f4', 'fortran_order': False, 'shape': shape} }\n".encode()
    path = tmp_path / "states.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(LayerwaveError, match=r"states\.npy"):
            StateFiles([path], N, numbering="output", final_state="pre_norm")[0]
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


def test_an_artifact_of_layers_without_features_is_refused(tmp_path):
    """No bytes at all, but layers over which everything after it would make arrays."""
    calibration = Calibration.from_states(np.ones((N, B, D)))
    calibration.save(tmp_path / "cal.safetensors")
    layers = 100
    sizes = {"sums": (1, layers, B, 0), "curves": (1, 0, layers), "kept": (1, 0)}
    arrays = load_file(tmp_path / "cal.safetensors") | {
        name: np.zeros(shape, np.int64 if name == "kept" else np.float32) for name, shape in sizes.items()
    }
    header = {"format": "layerwave.calibration", "format_version": "3", "settings": "null", "tallies": "{}"}
    header |= dict.fromkeys(("target_name", "target_fingerprint", "target_dtype", "data_fingerprint"), "x")
    save_file(arrays, tmp_path / "cal.safetensors", header)
    with pytest.raises(LayerwaveError, match=r"sums has shape \(1, 100, 4, 0\)"):
        Calibration.load(tmp_path / "cal.safetensors")


BOMB = "a: &a0 {k: v}\n" + "".join(
    f"b{n}: &a{n} {{{'<<: [' + ', '.join([f'*a{n - 1}'] * 20) + ']'}}}\n" for n in range(1, 12)
)
ALIASES = "- &a0 [x, x]\n" + "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 20)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    "text", [BOMB, ALIASES, "- &a {<<: *a}", "- " + "9" * 5000, "- 2026-99-99", "- {rho: !!python/object:os.system x}"]
)
def test_a_job_file_that_would_grow_without_bound(tmp_path, text):
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    with pytest.raises(LayerwaveError) as caught:
        read_jobs(path)
    assert len(str(caught.value)) < 10_000


def test_a_selection_that_contradicts_itself_is_refused(readers):
    record = json.loads(readers["selection.json"].content)
    beams = record["beams"]
    for change, message in [
        ({"boundaries": [1, 2]}, r"boundaries are \[1, 2\]"),
        ({"layers": [0, 1], "boundaries": [1, 2]}, r"does not hold the layers \[0, 1\]"),
        ({"score": float("nan")}, "score is nan, expected a number"),
        ({"score": float("inf")}, "a score is not finite"),
        ({"layers": [0, True]}, "layers.1. is True, expected a whole number"),
        ({"beams": [*beams[:1], [beams[1][0] | {"parents": [2]}]]}, "parents beyond the 2 sets"),
        ({"beams": [*beams[:1], [beams[1][0] | {"parents": []}]]}, "reached from no set"),
    ]:
        with pytest.raises(LayerwaveError, match=message):
            Selection.from_json(json.dumps(record | change))


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(LayerwaveError, match="key 'vocab_size' stands 2 times"):
        parse_json('{"vocab_size": 9, "hidden_size": 8, "vocab_size": 10}', "config.json", "mend it")


def test_a_value_in_a_message_is_short_whatever_it_is():
    nested: list = []
    for _ in range(40):
        nested = [nested, nested]  # written out, a trillion brackets
    for value in (nested, "x" * 10**6, {str(i): i for i in range(10**5)}, [1.5] * 10**6):
        assert len(shown(value)) < 500


def test_types_from_json():
    assert typed(tuple[int, ...] | None, [1, 2], "x") == (1, 2)
    assert typed(dict[str, float], {"a": 1}, "x") == {"a": 1.0}
    for kind, value in [
        (int, True),
        (int, 1.0),
        (float, "1"),
        (float, 10**400),
        (bool, 1),
        (str, None),
        (tuple[int, int], [1]),
    ]:
        with pytest.raises(LayerwaveError, match=r"^x"):
            typed(kind, value, "x")


def test_a_file_of_arrays_with_a_stranger_among_them_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(save({"states": np.zeros((N, 8, D), np.float32), "other": np.zeros(1)}))
    with pytest.raises(LayerwaveError, match="holds other, states: expected"):
        StateFiles([path], N, numbering="output", final_state="pre_norm")[0]
