"""Many calibrations from one YAML file: what is checked before, skipped, recorded, and left behind."""

import json
import re

import jax
import pytest
import yaml
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

import layerwave as lw
from layerwave.cli import main
from layerwave.commands.jobs import Job, attempt, read_jobs
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, DecoderConfig
from layerwave.targets import target as target_module
from layerwave.targets.checkpoint import save_decoder

CONFIG = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
FAST = {"block": 8, "replicates": 2, "token_sample": False}


def write_target(folder, seed):
    """A checkpoint of random weights, one token a byte."""
    folder.mkdir()
    config = DecoderConfig.from_hf(CONFIG)
    save_decoder(Decoder(config, rngs=nnx.Rngs(seed)), folder / "model.safetensors", "float32")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two targets, two files of conversations, and the place where commands run."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        write_target(tmp_path / f"target{seed}", seed)
    rows = [{"text": "the wave of states over depth " * n} for n in (3, 4, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "short.jsonl").write_text('{"text": "a"}')
    return tmp_path


def row(target="target0", conversations="rows.jsonl", out="a.safetensors", **changes):
    return {"target": target, "conversations": conversations, "out": out} | FAST | changes


def write_jobs(folder, *rows):
    (folder / "jobs.yaml").write_text(yaml.safe_dump(list(rows)))


def run(capsys, *, fails=False):
    """Statuses by out, and what was printed on stderr."""
    if fails:
        with pytest.raises(SystemExit) as exit_:
            main(["calibrate", "--jobs", "jobs.yaml", "--json"])
        assert exit_.value.code == 2
    else:
        main(["calibrate", "--jobs", "jobs.yaml", "--json"])
    captured = capsys.readouterr()
    return {outcome["out"]: outcome for outcome in json.loads(captured.out)}, captured.err


def test_rows_run_fail_and_are_skipped(folder, capsys):
    rows = [
        row(),
        row(conversations="short.jsonl", out="b.safetensors"),
        row(target="target1", out="c.safetensors", rho=0.5, max_length=4096, dtype="bfloat16", batch_tokens=256),
    ]
    write_jobs(folder, *rows)
    found, err = run(capsys, fails=True)
    assert {out: outcome["status"] for out, outcome in found.items()} == {
        "a.safetensors": "done",
        "b.safetensors": "failed",
        "c.safetensors": "done",
    }
    assert "every sample is shorter than a block" in found["b.safetensors"]["error"]
    assert "1 of 3 jobs failed (b.safetensors)" in err
    assert not (folder / "b.safetensors").exists()
    c = lw.Calibration.load(folder / "c.safetensors")
    assert (c.settings.rho, c.settings.max_length, c.target_dtype, c.target_name) == (0.5, 128, "bfloat16", "target1")
    direct = lw.calibrate(lw.load_target(folder / "target0"), folder / "rows.jsonl", **FAST)
    assert (lw.Calibration.load(folder / "a.safetensors").sums == direct.sums).all()

    before = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    write_jobs(folder, rows[0], rows[2])
    assert {outcome["status"] for outcome in run(capsys)[0].values()} == {"skipped"}
    assert {path: path.read_bytes() for path in folder.glob("*.safetensors")} == before


@pytest.mark.parametrize("changed", [{"rho": 0.6}, {"target": "target1"}, {"dtype": "bfloat16"}, {"seed": 3}])
def test_a_row_that_changed_runs_again(folder, changed):
    job = Job("target0", folder / "rows.jsonl", folder / "a.safetensors", lw.CalibrationSettings(**FAST))
    job.run()
    assert job.is_done()
    (other,) = read_jobs_of(folder, row(out=str(job.out), **changed))
    assert not other.is_done()


def read_jobs_of(folder, *rows):
    write_jobs(folder, *rows)
    return read_jobs(folder / "jobs.yaml")


def test_changed_conversations_run_again_and_the_same_in_another_order_do_not(folder):
    (job,) = read_jobs_of(folder, row())
    job.run()
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join(lines[::-1]))
    assert job.is_done()
    (folder / "rows.jsonl").write_text("\n".join([*lines, '{"text": "one more conversation"}']))
    assert not job.is_done()


def test_parameters_are_not_read_to_find_out(folder, monkeypatch):
    (job,) = read_jobs_of(folder, row())
    job.run()
    monkeypatch.setattr(target_module, "load_decoder", lambda *args: pytest.fail("parameters were read"))
    monkeypatch.setattr(lw.Calibration, "load", lambda *args: pytest.fail("arrays were read"))
    assert attempt(job).status == "skipped"


def test_a_target_is_gone_after_its_row(folder):
    ran, failed = read_jobs_of(folder, row(), row(conversations="short.jsonl", out="b.safetensors"))
    assert attempt(ran).status == "done"
    job = Job("target1", folder / "rows.jsonl", folder / "c.safetensors", ran.settings)
    before = len(jax.live_arrays())
    assert [attempt(job).status, attempt(failed).status] == ["done", "failed"]
    assert len(jax.live_arrays()) <= before


def test_any_failure_is_recorded(folder, monkeypatch):
    (job,) = read_jobs_of(folder, row())

    def out_of_memory(*args, **settings):
        raise MemoryError("4 GB")

    monkeypatch.setattr("layerwave.calibration.calibrate", out_of_memory)
    assert (attempt(job).status, attempt(job).error) == ("failed", "MemoryError: 4 GB")


def test_the_table(folder, capsys):
    write_jobs(folder, row(), row(conversations="short.jsonl", out="b.safetensors"))
    with pytest.raises(SystemExit):
        main(["calibrate", "--jobs", "jobs.yaml"])
    lines = capsys.readouterr().out.splitlines()
    assert any(re.search(r"target0 +rows.jsonl +a.safetensors +done +3 +\d+\.\d", line) for line in lines)
    assert any(re.search(r"short.jsonl +b.safetensors +failed +\d+\.\d +every sample", line) for line in lines)


def test_all_faults_are_listed_before_the_first_row_runs(folder):
    (folder / "held.safetensors").write_bytes(b"something else")
    rows = [
        row(),
        row(roh=0.3, rho="0.3", token_sample=1),
        row(out="b.safetensors", rho=2.0, dtype="float16", conversations="none.jsonl"),
        {"out": "c.safetensors"},
        row(target="./none", out="no/d.safetensors"),
        row(out="./a.safetensors"),
        row(out="held.safetensors", batch_tokens=0),
        "a row",
    ]
    with pytest.raises(LayerwaveError) as raised:
        read_jobs_of(folder, *rows)
    message = str(raised.value)
    assert "\n" not in message
    for fault in (
        "row 2: unknown key 'roh'",
        "row 2: rho is '0.3', but must be of type float",
        "row 2: token_sample is 1, but must be of type bool",
        "row 3: rho is 2.0",
        "row 3: dtype is 'float16'",
        "row 3: no file none.jsonl",
        "row 4: lacks target",
        "row 4: lacks conversations",
        "row 5: './none' is neither",
        "row 5: no/d.safetensors cannot be written",
        "a.safetensors is named 3 times",
        "row 7: batch_tokens is 0",
        "row 7: held.safetensors is no calibration",
        "row 8: a str, but must be a mapping",
    ):
        assert fault in message
    assert "14 faults, and no row was run" in message
    assert not (folder / "a.safetensors").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- {rho: 0.1, rho: 0.2}", "key 'rho' stands 2 times"),
        ("- [", "is no YAML"),
        ("target: mini", "must be a list of jobs"),
        ("", "must be a list of jobs"),
        ("- !!python/object/apply:os.getcwd []", "is no YAML"),
    ],
)
def test_files_that_are_no_jobs(tmp_path, content, message):
    (tmp_path / "jobs.yaml").write_text(content)
    with pytest.raises(LayerwaveError, match=message):
        read_jobs(tmp_path / "jobs.yaml")
    with pytest.raises(LayerwaveError, match="name a YAML file"):
        read_jobs(tmp_path / "none.yaml")


def test_rows_share_what_an_anchor_names(folder):
    (folder / "jobs.yaml").write_text(
        "- &first {target: target0, conversations: rows.jsonl, out: a.safetensors, rho: 0.5, block: 8}\n"
        "- {<<: *first, out: b.safetensors, rho: 1}\n"
    )
    first, second = read_jobs(folder / "jobs.yaml")
    assert (first.settings.rho, second.settings.rho, second.settings.block, second.out.name) == (
        0.5,
        1,
        8,
        "b.safetensors",
    )


def test_other_options_are_refused(folder, capsys):
    write_jobs(folder, row())
    for option in (["--rho", "0.5"], ["target0", "rows.jsonl"], ["--out", "x"], ["--num-layers", "3"]):
        with pytest.raises(SystemExit) as exit_:
            main(["calibrate", "--jobs", "jobs.yaml", *option])
        assert exit_.value.code == 2
        assert "write them into the rows" in capsys.readouterr().err
