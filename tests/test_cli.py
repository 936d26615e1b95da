"""The commands as a user runs them: what they print, what they write, and how they refuse."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import layerwave as lw
from layerwave.cli import main
from layerwave.doctor import unused_accelerators
from layerwave.progress import Progress

ASSETS = Path(lw.__file__).parent / "assets"


@pytest.fixture
def states(tmp_path):
    """A saved calibration of given states: seven layers of eight tokens."""
    path = tmp_path / "states.safetensors"
    lw.Calibration.from_states(np.random.default_rng(0).normal(size=(7, 8, 5))).save(path)
    return path


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The quickstart in a process of its own, run from a folder that is not the checkout."""
    folder = tmp_path_factory.mktemp("quickstart")
    environment = os.environ | {"PYTHONPATH": str(Path(lw.__file__).parents[1])}
    command = [sys.executable, "-m", "layerwave.cli", "quickstart", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=True)
    return done, folder / "layerwave-out"


def refused(capsys, *args) -> str:
    """The one line on stderr of a command that exits with code 2."""
    with pytest.raises(SystemExit) as exit_:
        main([str(arg) for arg in args])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("layerwave: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_quickstart_writes_what_the_library_reads(quickstart):
    done, out = quickstart
    report = json.loads(done.stdout)
    assert {path.name for path in out.iterdir()} >= {"calibration.safetensors", "selection.json", "wave.png"}
    assert (out / "wave.png").read_bytes().startswith(b"\x89PNG")
    calibration = lw.Calibration.load(out / "calibration.safetensors")
    assert calibration.num_layers >= 12
    assert report["calibration"]["samples"] >= 64
    selection = lw.Selection.load(out / "selection.json")
    rows = {(row["method"], row["size"]): row for row in report["comparison"]}
    assert tuple(rows["elsi", 3]["layers"]) == selection.layers == lw.elsi(calibration, 3).layers
    assert tuple(rows["exhaustive", 3]["layers"]) == lw.exhaustive(calibration, 3).layers
    assert {size for _, size in rows} == {1, 2, 3}
    assert rows["eagle3", 3]["layers"] == list(lw.baseline("eagle3", calibration.num_layers))
    assert all(row["gap_nats"] >= 0 and 1 <= row["rank"] <= row["of"] for row in rows.values())


def test_quickstart_predicts_acceptance(quickstart):
    done, out = quickstart
    report = json.loads(done.stdout)
    calibration = lw.Calibration.load(out / "calibration.safetensors")
    best = {row["size"]: row["acceptance"]["value"] for row in report["comparison"] if row["method"] == "acceptance"}
    assert set(best) == {1, 2, 3}
    for row in report["comparison"]:
        found = lw.predicted_acceptance(calibration, [row["layers"]])
        assert row["acceptance"]["value"] == pytest.approx(found.value[0], abs=1e-4)
        assert row["acceptance"]["standard_error"] == pytest.approx(found.standard_error[0], abs=1e-4)
        assert row["acceptance"]["behind"]["value"] <= 0
    assert [single["layers"] for single in report["singles"]] == [[layer] for layer in range(calibration.num_layers)]
    assert report["acceptance"]["best"]["value"] == max(best.values())
    assert len(report["acceptance"]["smallest"]["layers"]) <= len(report["acceptance"]["best"]["layers"])
    assert report["acceptance"]["readings"]["Smallest good set"].startswith("The smallest good set is ")


def test_select_by_acceptance_prints_errors(quickstart, tmp_path, capsys):
    calibration, chosen = quickstart[1] / "calibration.safetensors", tmp_path / "chosen.json"
    args = ["select", str(calibration), "--criterion", "acceptance", "--size", "1", "--beam", "3"]
    main([*args, "--out", str(chosen)])
    captured = capsys.readouterr()
    assert "scoring layer sets by acceptance" in captured.err
    assert len(re.findall(r"0\.\d{4} ± 0\.\d{4} +[+-]0\.\d{4} ± 0\.\d{4} +(?:yes|no)", captured.out)) == 3
    main([*args, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["criterion"] == "acceptance"
    assert tuple(record["layers"]) == lw.Selection.load(chosen).layers
    assert [kept["layers"] for kept in record["acceptance"]] == [kept["layers"] for kept in record["beams"][-1]]
    assert all(kept["standard_error"] > 0 for kept in record["acceptance"])


def test_the_pages_show_what_quickstart_prints(quickstart):
    """Layers and ranks to the letter, scores to what another processor may round; of the README's table one size."""
    root, report = Path(__file__).parents[1], json.loads(quickstart[0].stdout)
    for page, sizes in (("README.md", {3}), ("docs/numbers.md", {1, 2, 3})):
        printed = re.findall(
            r"^ +(\d) +(\w+) +([\d,]+) +[\d,]+ +([\d.]+) +[\d.]+ +(\d+) of +\d+ +([\d.]+) ± ([\d.]+)",
            (root / page).read_text(),
            re.MULTILINE,
        )
        rows = [row for row in report["comparison"] if row["size"] in sizes]
        assert [(int(size), method) for size, method, *_ in printed] == [(row["size"], row["method"]) for row in rows]
        for (_, method, layers, entropy, rank, value, error), row in zip(printed, rows, strict=True):
            assert float(value) == pytest.approx(row["acceptance"]["value"], abs=1e-3)
            assert float(error) == pytest.approx(row["acceptance"]["standard_error"], abs=1e-3)
            if method != "acceptance":  # near ties there may turn on rounding
                assert list(map(int, layers.split(","))) == row["layers"]
                assert int(rank) == row["rank"]
                assert float(entropy) == pytest.approx(row["entropy_nats"], abs=2e-4)
    text = (root / "docs/numbers.md").read_text()
    singles = re.findall(r"^ +(\d+) +\d+ +([\d.]+) +([\d.]+) ± ([\d.]+) .* [\d.]+$", text, re.MULTILINE)
    assert [int(layer) for layer, *_ in singles] == list(range(len(report["singles"])))
    for (_, entropy, value, error), single in zip(singles, report["singles"], strict=True):
        assert float(entropy) == pytest.approx(single["entropy_nats"], abs=2e-4)
        assert float(value) == pytest.approx(single["value"], abs=1e-3)
        assert float(error) == pytest.approx(single["standard_error"], abs=1e-3)


def test_quickstart_says_nothing_but_progress_and_near_ties_on_stderr(quickstart):
    done, _ = quickstart
    parts = ("calibrating mini", "predicting acceptance", "layerwave: warning: near tie: ")
    lines = done.stderr.splitlines()
    assert all(line.startswith(parts) for line in lines), done.stderr
    assert len(set(lines)) == len(lines), "a near tie is said once"


def test_calibrate_then_select(tmp_path, capsys):
    conversations = tmp_path / "some.jsonl"
    lines = (ASSETS / "conversations.jsonl").read_text().splitlines()[:6]
    conversations.write_text("\n".join(lines))
    out, chosen = tmp_path / "cal.safetensors", tmp_path / "selection.json"
    main(["calibrate", "mini", str(conversations), "--out", str(out), "--block", "8", "--rho", "0.5", "--json"])
    assert json.loads(capsys.readouterr().out)["samples"] == 6
    assert lw.Calibration.load(out).settings.rho == 0.5
    main(["select", str(out), "--method", "elsi_c", "--size", "2", "--pool", "3", "--out", str(chosen)])
    selection = lw.Selection.load(chosen)
    assert selection.settings["pool"] == 3
    assert ",".join(map(str, selection.layers)) in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cal.safetensors", "selection.json", "some.jsonl"]


def test_select_json_is_the_file(states, tmp_path, capsys):
    main(["select", str(states), "--size", "2", "--out", str(tmp_path / "s.json"), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "s.json").read_text())


def test_ids_table(capsys):
    main(["ids", "2,18,33", "--num-layers", "36", "--json"])
    rows = {row["consumer"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["vllm"]["ids"] == [3, 19, 34]
    assert rows["specforge"]["ids"] == [2, 18, 33]
    main(["ids", "2,18,33", "--num-layers", "36"])
    assert "3,19,34" in capsys.readouterr().out


def test_doctor(capsys):
    main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["layerwave"] == "0.1.0"
    assert report["devices"]


def test_doctor_is_loud_about_an_unused_accelerator():
    found = {"NVIDIA GPU": ["/dev/nvidia0"], "TPU": []}
    (warning,) = unused_accelerators("cpu", found)
    assert "NVIDIA GPU present" in warning
    assert "cuda13" in warning
    assert unused_accelerators("gpu", found) == ()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--size", 9), "9"),
        (("--size", 0), "0"),
        (("--beam", 0), "beam"),
        (("--method", "elsy"), "unknown method 'elsy'"),
        (("--method", "eagle3", "--size", 2), "3 layers"),
        (("--alpha", -1), "alpha"),
        (("--criterion", "luck"), "unknown criterion 'luck'"),
    ],
)
def test_select_refuses(states, capsys, args, message):
    assert message in refused(capsys, "select", states, *args)


def test_select_refuses_a_file_that_is_not_a_calibration(tmp_path, capsys):
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "x.safetensors")
    assert "format" in refused(capsys, "select", tmp_path / "x.safetensors")
    assert "no such file" in refused(capsys, "select", tmp_path / "y.safetensors")


def test_select_refuses_an_artifact_of_another_version(states, capsys):
    from safetensors import safe_open

    with safe_open(states, "numpy") as file:
        metadata = file.metadata()
    save_file(load_file(states), states, metadata | {"format_version": "99"})
    assert "99" in refused(capsys, "select", states)


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ('{"messages": [\n', (), "line"),
        ("[]", (), "no"),
        ('{"text": "short"}\n', (), "block"),
        ('{"text": "short"}\n', ("--rho", "1.5"), "rho"),
        ('{"text": "short"}\n', ("--rho", "0"), "rho"),
    ],
)
def test_calibrate_refuses_and_writes_nothing(tmp_path, capsys, content, args, message):
    conversations = tmp_path / "rows.jsonl"
    conversations.write_text(content)
    out = tmp_path / "cal.safetensors"
    with pytest.raises(SystemExit) as exit_:
        main(["calibrate", "mini", str(conversations), "--out", str(out), *args])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [conversations]


def test_calibrate_refuses_before_the_work_an_output_it_cannot_write(tmp_path, capsys):
    assert "folder that exists" in refused(capsys, "calibrate", "mini", "x.jsonl", "--out", tmp_path / "no" / "c")


def test_an_input_is_never_overwritten(states, capsys):
    before = states.read_bytes()
    assert "would be lost" in refused(capsys, "select", states, "--out", states)
    assert "would be lost" in refused(capsys, "merge", states, states, "--out", states)
    assert states.read_bytes() == before


def test_unknown_target(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    assert "no_such" in refused(capsys, "calibrate", "./no_such", rows, "--out", tmp_path / "c.safetensors")


@pytest.mark.parametrize(("layers", "message"), [("5,x", "5,x"), ("5,5", "5"), ("36", "36"), ("", "''")])
def test_ids_refuses(capsys, layers, message):
    assert message in refused(capsys, "ids", layers, "--num-layers", 36)


def test_mistyped_flag(states, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["select", str(states), "--sise", "3"])
    assert exit_.value.code == 2
    assert "--size" in capsys.readouterr().err


def test_progress_prints_plain_lines_without_a_terminal(capsys):
    with Progress("working") as progress:
        for done in range(1, 101):
            progress(done, 100, 10 * done)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "working …"
    assert len(lines) == 11
    assert lines[-1].startswith("working: 100/100 samples, 1,000 tokens")


def test_merge(tmp_path, capsys):
    lines = (ASSETS / "conversations.jsonl").read_text().splitlines()[:4]
    parts = []
    for half in (0, 1):
        rows = tmp_path / f"{half}.jsonl"
        rows.write_text("\n".join(lines[2 * half : 2 * half + 2]))
        parts.append(tmp_path / f"{half}.safetensors")
        main(["calibrate", "mini", str(rows), "--out", str(parts[-1]), "--block", "8", "--json"])
    capsys.readouterr()
    out = tmp_path / "both.safetensors"
    main(["merge", *map(str, parts), "--out", str(out), "--without-replicates", "--json"])
    assert json.loads(capsys.readouterr().out)["samples"] == 4
    assert lw.Calibration.load(out).replicates is None
    assert "at least two" in refused(capsys, "merge", parts[0], "--out", out)


def test_from_prompts_to_an_exported_draft(tmp_path, capsys):
    """The commands of the README's section on drafts, one after the other."""
    prompts, conversations, run = (tmp_path / name for name in ("prompts.jsonl", "conversations.jsonl", "run"))
    questions = ["How many eggs do 3 hens lay in 4 days, if each lays one a day?", "Write a function that adds."]
    shared = "Name thirteen words in a row that stand in both files, as this line does word for word."
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (*questions * 2, shared)))
    evaluation = tmp_path / "questions.jsonl"
    evaluation.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": [shared]}) + "\n")

    def result(*args):
        main([str(arg) for arg in (*args, "--json")])
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    result("distill", "mini", prompts, "--out", conversations, "--max-new-tokens", 12)
    sizes = ["--max-length", 64, "--batch-size", 2, "--steps", 2, "--ttt-steps", 2, "--draft-vocab-size", 64]
    layers, held = ["--layers", "2,6,9", "--layers", "10"], ["--evaluation", evaluation, "--held-out", 0]
    trained, said = result("train", "mini", conversations, *layers, *sizes, *held, "--out", run)
    assert [line["layers"] for line in trained["drafts"]] == [[2, 6, 9], [10]]
    assert "left out: " in said
    assert "thirteen words in a row" in said

    asked = ["--questions", evaluation, "--nodes", 8, "--depth", 4, "--top-k", 3, "--temperature", 0]
    found, _ = result(
        "evaluate", "mini", run / "drafts/2-6-9", *asked, "--max-new-tokens", 8, "--out", tmp_path / "evaluation.json"
    )
    assert [draft["layers"] for draft in found["drafts"]] == [[2, 6, 9]]
    result("export", run / "drafts/10", "--consumer", "speculators", "--target", "mini", "--out", tmp_path / "exported")
    assert (tmp_path / "exported" / "config.json").is_file()
