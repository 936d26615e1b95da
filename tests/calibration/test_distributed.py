"""Several processes give the calibration of one; what is committed is kept, and what fails or dies ends the job."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from layerwave.calibration import Calibration, CalibrationSettings, calibrate
from layerwave.calibration.distributed import Job, Processes, calibrate_distributed
from layerwave.calibration.stream import Work
from layerwave.cli import main
from layerwave.errors import LayerwaveError
from layerwave.selection import elsi
from layerwave.targets import load_target
from tests.kill_runs import CASES, ENDED, Running, make_inputs

RNG = np.random.default_rng(0)
ROWS = [{"text": " ".join(RNG.choice("the wave of states is a quiz in lazy prose".split(), 60))} for _ in range(20)]
SETTINGS = CalibrationSettings(block=8, samples=18, max_length=64, replicates=4, fit_positions=200, score_positions=100)
BATCH_TOKENS = 128


def assert_same(ours, theirs, tolerance):
    """Equal to a tolerance relative to each layer's largest number; exactly for 0."""
    for name in ("counts", "kept", "lengths", "sinks", "fingerprints"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert (ours.settings, ours.tallies, ours.data_fingerprint) == (
        theirs.settings,
        theirs.tallies,
        theirs.data_fingerprint,
    )
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in ("sums", "curves")]
    pairs += [(getattr(ours.replicates, name), getattr(theirs.replicates, name)) for name in ("grams", "sums")]
    for name, array in vars(theirs.tokens).items():
        if name in ("states", "embeddings", "normed", "head", "log_normaliser"):
            pairs.append((getattr(ours.tokens, name), array))
        else:
            np.testing.assert_array_equal(getattr(ours.tokens, name), array)
    for ours_, theirs_ in pairs:
        assert ours_.shape == theirs_.shape
        np.testing.assert_array_equal(np.isnan(ours_), np.isnan(theirs_))
        if tolerance == 0:
            np.testing.assert_array_equal(ours_, theirs_)
        else:
            np.testing.assert_allclose(ours_, theirs_, rtol=0, atol=tolerance * np.nanmax(np.abs(theirs_)))


@pytest.fixture(scope="module")
def work() -> Work:
    return Work.prepare(load_target("mini"), ROWS, SETTINGS, BATCH_TOKENS)


@pytest.fixture(scope="module")
def alone(work):
    return calibrate(work.target, ROWS, SETTINGS, batch_tokens=BATCH_TOKENS)


def test_shards_of_any_size_merge_to_the_calibration_of_one_pass(work, alone, tmp_path):
    assert len(work.plan) == 9
    for shard_batches in (4, 100):
        out = tmp_path / f"{shard_batches}.safetensors"
        merged = calibrate_distributed(work, out, Processes(0, 1), shard_batches=shard_batches)
        assert_same(merged, alone, 1e-5)
        assert_same(Calibration.load(out), merged, 0)
        assert [path.name for path in tmp_path.glob(f"{shard_batches}.*")] == [out.name]
        assert elsi(merged, size=3).layers == elsi(alone, size=3).layers


def test_sums_of_replicates_are_dropped_after_the_merge_not_before(work, tmp_path):
    """A limit that a part's sums exceed as well as those of the whole."""
    limited = replace(work, settings=replace(work.settings, replicate_megabytes=0.0))
    merged = calibrate_distributed(limited, tmp_path / "out.safetensors", Processes(0, 1), shard_batches=4)
    whole = limited.run()
    assert merged.replicates.sums is whole.replicates.sums is None
    np.testing.assert_allclose(merged.replicates.grams, whole.replicates.grams, rtol=1e-4)
    assert merged.settings == limited.settings


def test_parts_of_another_calibration_are_refused_and_every_difference_named(work, tmp_path):
    Job(tmp_path / "out.parts", work, 4).open()
    other = replace(work, settings=replace(work.settings, rho=0.5), plan=work.plan[:8])
    with pytest.raises(LayerwaveError, match=r"batches.2 x 64 tokens was 9, is 8; settings.rho was 0.3, is 0.5"):
        Job(tmp_path / "out.parts", other, 4).open()


def test_what_a_process_fails_of_is_told_by_the_others(work, tmp_path):
    job = Job(tmp_path / "out.parts", work, 4)
    job.open()
    with pytest.raises(OSError, match="disk is full"), job.failing(1):
        raise OSError("disk is full")
    told = r"process 1 failed \(OSError\('disk is full'\)\); mend it .* goes on with the 0 of 3 parts"
    with pytest.raises(LayerwaveError, match=told), job.failing(0):
        job.wait(lambda: False)
    with pytest.raises(LayerwaveError, match=told):
        job.run(range(1), None)
    assert [path.name for path in job.folder.glob("failed*")] == ["failed-1.txt"]
    job.open()  # the next start
    job.run(range(1), None)
    assert job.parts[0].exists()


def test_numbers_of_processes_without_distributed_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", "mini", "x.jsonl", "--out", str(tmp_path / "c"), "--process", "0", "--processes", "2"])
    assert "processes, process given for one process alone: add --distributed" in capsys.readouterr().err


WATCHED = """
import os, signal, sys
from layerwave.calibration import Calibration
from layerwave.cli import main

save = Calibration.save

def watched(self, path):
    save(self, path)
    print("committed", path.name, flush=True)
    if "--die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)

Calibration.save = watched
main([argument for argument in sys.argv[1:] if argument != "--die"])
"""


def run_processes(number, out, data, cache, dying=None):
    """(exit code, stdout, stderr) of each; a job that hangs fails the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = "--block 8 --samples 18 --max-length 64 --replicates 4 --fit-positions 200 --score-positions 100"
    command = (
        f"calibrate mini {data} --out {out} {settings} --batch-tokens {BATCH_TOKENS} --shard-batches 1 --distributed "
    )
    command += f"--coordinator 127.0.0.1:{port} --processes {number} --heartbeat-seconds 10"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WATCHED, *command.split(), "--process", str(k), *(["--die"] if k == dying else [])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in range(number)
    ]
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(started, said, strict=True)]


def test_a_signal_ends_a_process_while_the_others_are_stuck_or_not_there(tmp_path):
    make_inputs(tmp_path)
    job = CASES["distributed"], tmp_path / "inputs", tmp_path / "out.safetensors", tmp_path / "cache"
    running = Running(*job)
    try:
        assert running.began.wait(200)
        running.processes[1].send_signal(signal.SIGSTOP)
        running.processes[0].send_signal(signal.SIGTERM)
        assert running.processes[0].wait(60) == 143
    finally:
        for process in running.processes:
            process.kill()
    (ended, _) = running.wait()
    assert ended.said.endswith(ENDED)

    running = Running(*job)
    try:
        running.processes[1].kill()
        while not listens(running.port):  # then it waits for the other in JAX, which Python hears nothing of
            time.sleep(0.1)
        running.processes[0].send_signal(signal.SIGTERM)
        assert running.processes[0].wait(60) == -signal.SIGTERM
    finally:
        running.processes[0].kill()
        running.wait()
    assert not (tmp_path / "out.safetensors").exists()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def committed(ended):
    lines = [line.split() for _, stdout, _ in ended for line in stdout.splitlines()]
    return sorted(line[1] for line in lines if line[0] == "committed" and line[1].startswith("part"))


def test_two_processes_and_four_that_resume_a_killed_job(alone, tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(f'{{"text": "{row["text"]}"}}\n' for row in ROWS))
    whole, killed = tmp_path / "whole.safetensors", tmp_path / "killed.safetensors"
    parts = [f"part-{shard:05}.safetensors" for shard in range(9)]

    ended = run_processes(2, whole, data, tmp_path / "cache")
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert committed(ended) == parts

    ended = run_processes(2, killed, data, tmp_path / "cache", dying=1)
    codes = [code for code, _, _ in ended]
    assert codes[1] == -9
    assert codes[0] != 0, ended
    before = committed(ended)
    assert parts[1] in before
    assert parts[3] not in before
    assert not killed.exists()

    ended = run_processes(4, killed, data, tmp_path / "cache")
    assert [code for code, _, _ in ended] == [0] * 4, ended
    assert committed(ended) == sorted(set(parts) - set(before))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors*")) == [killed.name, whole.name]

    resumed = Calibration.load(killed)
    assert_same(resumed, Calibration.load(whole), 0)
    assert_same(resumed, alone, 1e-5)
    assert elsi(resumed, size=3).layers == elsi(alone, size=3).layers
