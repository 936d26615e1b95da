"""Files of strangers: nothing in them is run, nothing outside their folder is read or written, and nobody waits."""

import ast
import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import layerwave
from layerwave.calibration.conversations import Conversation, Turn
from layerwave.calibration.tokens import TemplateRefusalError, encode
from layerwave.cli import main
from layerwave.commands.jobs import read_jobs
from layerwave.commands.printing import print_table, table_of
from layerwave.errors import LayerwaveError, one_line
from layerwave.interop import StateFiles
from layerwave.targets import load_target
from layerwave.targets.checkpoint import TensorFiles
from layerwave.targets.target import MINI_FOLDER

PACKAGE = Path(layerwave.__file__).parent
GOLDEN = Path(__file__).parent / "targets" / "golden" / "qwen3"
RUNS_CODE = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy", "code"}


def calls(path):
    """Of every call in a file: the dotted name of what is called, and its keywords."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}, node


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_in_the_package_loads_code_from_files(path):
    assert not RUNS_CODE & set(imports(path))
    for name, words, node in calls(path):
        assert name not in ("eval", "exec", "compile", "__import__", "os.system"), f"line {node.lineno}"
        assert words.get("trust_remote_code", "False") == "False", f"line {node.lineno}"
        assert words.get("allow_pickle", "False") == "False", f"line {node.lineno}"
        if name.endswith(("torch.load", "np.load", "numpy.load")):
            assert "weights_only" in words or "allow_pickle" in words, f"line {node.lineno}"
        if name == "torch.load":
            assert words["weights_only"] == "True", f"line {node.lineno}"
        if name == "yaml.load":
            assert ast.unparse(node.args[1]) == "_Loader", f"line {node.lineno}"


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.fixture
def trap(tmp_path):
    """A pickle that works, and the folder that stands there once it was loaded."""
    made = tmp_path / "made"
    content = pickle.dumps(Payload(made))
    pickle.loads(content)
    assert made.is_dir()
    made.rmdir()
    return content, made


def test_no_reader_unpickles(trap, tmp_path):
    content, made = trap
    np.save(tmp_path / "states.npy", np.array([Payload(made)], object), allow_pickle=True)
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(content)
    with pytest.raises(LayerwaveError, match="only safetensors checkpoints are read"):
        TensorFiles.open(folder)
    for name in ("model.safetensors", "states.safetensors", "rows.jsonl", "selection.json"):
        (folder / name).write_bytes(content)
    for read in (
        lambda: StateFiles([tmp_path / "states.npy"], 1, numbering="output", final_state="pre_norm")[0],
        lambda: StateFiles([folder / "states.safetensors"], 1)[0],
        lambda: TensorFiles.open(folder),
        lambda: layerwave.Calibration.load(folder / "model.safetensors"),
        lambda: layerwave.read_conversations(folder / "rows.jsonl"),
        lambda: layerwave.Selection.load(folder / "selection.json"),
        lambda: layerwave.load_draft(folder),
    ):
        with pytest.raises(LayerwaveError):
            read()
    assert not made.exists()


@pytest.mark.parity
def test_a_torch_file_is_not_unpickled_either(trap, tmp_path):
    pytest.importorskip("torch")
    from layerwave.interop import read_specforge

    content, made = trap
    (tmp_path / "data_0.ckpt").write_bytes(content)
    with pytest.raises(LayerwaveError, match="not a hidden-state file of SpecForge"):
        read_specforge(tmp_path / "data_0.ckpt", 4, [0, 1])
    assert not made.exists()


@pytest.fixture
def mini(tmp_path):
    """A copy of the bundled target."""
    shutil.copytree(MINI_FOLDER, tmp_path / "mini")
    return tmp_path / "mini"


def test_code_beside_a_model_is_not_run(mini, tmp_path):
    made = tmp_path / "made"
    (mini / "remote.py").write_text(f"import os\nos.mkdir({str(made)!r})\nclass T:\n    pass\n")
    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((mini / name).read_text())
        content["auto_map"] = {key: "remote.T"}
        (mini / name).write_text(json.dumps(content))
    with suppress(LayerwaveError):  # or it loads without that code
        load_target(mini)
    assert not made.exists()


# Paths.


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "..", "", 5, "a\0b", "x" * 300]
)
def test_an_index_names_files_of_its_folder_alone(tmp_path, shard):
    folder = tmp_path / "model"
    (folder / "a").mkdir(parents=True)
    for path in (tmp_path / "outside.safetensors", folder / "a" / "b.safetensors"):
        save_file({"x": np.ones(2, np.float32)}, path)
    shard = str(tmp_path / shard[1:]) if str(shard).startswith("/") else shard
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))
    with pytest.raises(LayerwaveError, match="no plain file name"):
        TensorFiles.open(folder)


def test_a_shard_whose_name_no_system_can_write(tmp_path):
    """Found by the fuzzer."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "\ud800"}}))
    with pytest.raises(LayerwaveError, match="cannot be read"):
        TensorFiles.open(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_links_of_a_model_stay_in_its_folder(mini, tmp_path, name):
    (mini / name).rename(tmp_path / name)
    (mini / name).symlink_to(tmp_path / name)
    with pytest.raises(LayerwaveError, match="is a link that leads out of its folder"):
        load_target(mini)
    (mini / name).unlink()
    (tmp_path / name).rename(mini / f"real-{name}")
    (mini / name).symlink_to(f"real-{name}")
    TensorFiles.open(mini)


def test_links_of_the_hub_s_cache_are_followed(tmp_path):
    """The hub keeps a file under its digest and links to it from a snapshot."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    shutil.copy(GOLDEN / "model.safetensors", blobs / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4567")
    assert TensorFiles.open(snapshot).files
    shutil.copy(GOLDEN / "model.safetensors", tmp_path / "89ab")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../89ab")
    with pytest.raises(LayerwaveError, match="leads out of its folder"):
        TensorFiles.open(snapshot)


def test_links_of_a_draft_stay_in_its_folder(tmp_path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (tmp_path / "config.json").write_text("{}")
    (folder / "config.json").symlink_to("../config.json")
    with pytest.raises(LayerwaveError, match="leads out of its folder"):
        layerwave.load_draft(folder)


def test_links_in_a_folder_of_states_stay_there(tmp_path):
    folder = tmp_path / "states"
    folder.mkdir()
    np.save(tmp_path / "a.npy", np.ones((2, 8, 4), np.float32))
    np.save(folder / "b.npy", np.ones((2, 8, 4), np.float32))
    (folder / "a.npy").symlink_to("../a.npy")
    with pytest.raises(LayerwaveError, match="leads out of its folder"):
        StateFiles([folder], 2)
    (folder / "a.npy").unlink()
    np.save(tmp_path / "e.npy", np.ones(8))
    (folder / "b.entropies.npy").symlink_to("../e.npy")
    with pytest.raises(LayerwaveError, match="leads out of its folder"):
        StateFiles([folder], 2, numbering="output", final_state="pre_norm")[0]


@pytest.mark.parametrize("out", ["a\\0b", "x" * 5000, "mine.safetensors"])
def test_jobs_write_over_nothing_but_calibrations(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    (tmp_path / "mine.safetensors").write_text("a file of another kind")
    (tmp_path / "jobs.yaml").write_text(f'- {{target: mini, conversations: rows.jsonl, out: "{out}"}}')
    with pytest.raises(LayerwaveError, match=r"would be lost|cannot be a path|too long"):
        read_jobs(tmp_path / "jobs.yaml")


# Chat templates.


@pytest.fixture(scope="module")
def tokenizer():
    return load_target("mini").tokenizer


CHAT = Conversation((Turn("user", "hello"),), "", "row 1")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.mkdir('made') }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ],
)
def test_a_template_reaches_neither_python_nor_files(tokenizer, monkeypatch, tmp_path, template):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(TemplateRefusalError):
        encode(tokenizer, CHAT)
    assert not [*tmp_path.iterdir()]


# What is printed.


def test_markup_in_a_table_is_text(capsys):
    table = table_of("[b]what[/b]")
    table.add_row("a[/nonsense] [red]b :smile:")
    print_table(table)
    assert "a[/nonsense] [red]b :smile:" in capsys.readouterr().out


def test_a_message_is_one_short_line_that_steers_no_terminal():
    text = one_line(LayerwaveError("a\nb\x1b[2J\x07 \u202e\ud800é" + "x" * 10**6))
    assert text.startswith("a b\\x1b[2J\\x07 \\u202e\\ud800é")
    assert "\n" not in text
    assert len(text) < 5000


@pytest.mark.parametrize("place", [0, 1, 5])
def test_the_traceback_is_shown_on_demand_alone(tmp_path, capsys, place):
    (tmp_path / "x.safetensors").write_bytes(b"\x1b[2J")
    command = ["select", str(tmp_path / "x.safetensors"), "--size", "2", "--json"]
    for args in (command, [*command[:place], "--debug", *command[place:]]):
        with pytest.raises(SystemExit) as exit_:
            main(args)
        assert exit_.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("layerwave: error: ")
        assert (lines[0] == "Traceback (most recent call last):") == ("--debug" in args)
        assert (len(lines) > 1) == ("--debug" in args)


def test_a_path_that_no_system_takes_ends_in_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["report", "x" * 5000])
    assert exit_.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_damaged_weights_in_every_command_s_target_exit_with_2(mini, tmp_path, capsys):
    tensors = load_file(mini / "model.safetensors")
    save_file({name: tensor.astype(np.int32) for name, tensor in tensors.items()}, mini / "model.safetensors")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    for args in (["calibrate", str(mini), str(rows)], ["distill", str(mini), str(rows)]):
        with pytest.raises(SystemExit) as exit_:
            main([*args, "--out", str(tmp_path / "out")])
        assert exit_.value.code == 2
        assert "is int32, expected floating-point" in capsys.readouterr().err
