"""Whole or not at all: killed at every step, on a full disk, in a folder that cannot be written, and by two runs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from layerwave.decoding.journal import Journal
from layerwave.errors import LayerwaveError
from layerwave.files.lock import only_run
from layerwave.files.writing import Lines, make_folder, sweep, whole_directory, whole_file

KILLED = """
import os, signal, sys
from pathlib import Path
from layerwave.files.writing import Lines, whole_directory, whole_file
from layerwave.files.lock import only_run

def file(out):
    with only_run(out), whole_file(out) as partial:
        partial.write_text("new" * 1000)

def directory(out):
    with only_run(out), whole_directory(out) as partial:
        for name in "ab":
            (partial / name).write_text("new" * 1000)

def lines(out):
    with only_run(out):
        log = Lines(out)
        for i in range(3):
            log.append("new")
        log.close()

def contents(out):
    if out.is_dir():
        return {path.name: path.read_text() for path in sorted(out.iterdir())}
    return out.read_text() if out.exists() else None

def run(write, out, last):
    \"\"\"Whether a child that does this, killed before its step `last`, did not get so far.\"\"\"
    child = os.fork()
    if child == 0:
        seen = 0
        def kill(event, arguments):
            nonlocal seen
            if event.split(".")[0] in ("open", "os", "shutil", "ctypes", "pathlib"):
                seen += 1
                if seen == last:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(kill)
        write(out)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

for write, before, after in (
    (file, None, "new" * 1000),
    (file, "old", "new" * 1000),
    (directory, None, {"a": "new" * 1000, "b": "new" * 1000}),
    (directory, {"a": "old", "b": "old"}, {"a": "new" * 1000, "b": "new" * 1000}),
    (lines, None, "new\\n" * 3),
):
    found, last, done = [], 0, False
    while not done:
        folder = Path(sys.argv[1], f"{write.__name__}-{before is None}-{last}")
        out = folder / "out"
        folder.mkdir()
        if isinstance(before, dict):
            out.mkdir()
            for name, text in before.items():
                (out / name).write_text(text)
        elif before is not None:
            out.write_text(before)
        last += 1
        done = run(write, out, last)
        found.append(contents(out))
        whole = [before, after] if write is not lines else [None, *("new\\n" * i for i in range(4))]
        assert found[-1] in whole, (write, last, found[-1])
        if write is lines and out.exists():
            out.unlink()
        write(out)
        assert contents(out) == after, (write, last)
        assert [path.name for path in folder.iterdir()] == ["out"], (write, last, list(folder.iterdir()))
    assert before in found and after in found, write
    print(write.__name__, last)
"""


def test_a_writer_killed_before_each_of_its_steps_leaves_the_old_or_the_new_and_the_next_run_cleans_up(tmp_path):
    """In a process without JAX, whose threads do not survive a fork."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(steps) == 5
    assert min(steps) > 5


@pytest.fixture(params=["tmpfs", "limit"])
def full(request, tmp_path):
    """A folder in which 64 kB can be written: a small tmpfs where mounting is allowed; and a limit of each file."""
    import resource

    folder = tmp_path / "full"
    folder.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
        try:
            done = subprocess.run(mount, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no mount here")
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield folder
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_clear_error_and_what_was_there_stays(full):
    out, draft = full / "out.bin", full / "draft"
    tensors = {"x": np.zeros(100_000, np.float32)}
    with whole_file(out) as partial:
        partial.write_bytes(b"good")
    with whole_directory(draft) as partial:
        save_file({"x": np.zeros(2, np.float32)}, partial / "x")
    good = (draft / "x").read_bytes()
    remedy = r"cannot be written \(.+\): make room, then run the same command again; what was there is as it was$"
    with pytest.raises(LayerwaveError, match=remedy), whole_file(out) as partial:
        partial.write_bytes(bytes(100_000))
    with pytest.raises(LayerwaveError, match=remedy), whole_file(out) as partial:
        save_file(tensors, partial)
    with pytest.raises(LayerwaveError, match=remedy), whole_directory(draft) as partial:
        save_file(tensors, partial / "x")
    assert (out.read_bytes(), (draft / "x").read_bytes()) == (b"good", good)
    assert sorted(path.name for path in full.iterdir()) == ["draft", "out.bin"]


def test_of_a_line_that_does_not_fit_nothing_is_left(full):
    """A short write is no error to the system: the next line would continue the torn one."""
    journal = Journal(full / "out.partial", {"run": 1})
    assert journal.resume(str) == []
    journal.append("a" * 40_000)
    with pytest.raises(LayerwaveError, match="make room"):
        journal.append("b" * 40_000)
    journal.append("c")
    assert journal.resume(str) == ["a" * 40_000, "c"]


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    """Root may write anywhere but into a read-only file system, and into what is no folder."""
    (tmp_path / "file").touch()
    places = [tmp_path / "file" / "out", Path("/proc/layerwave-out"), tmp_path / "absent" / "out"]
    for out in places:
        refusal = r"out cannot be written \(.+\): name an? "
        with pytest.raises(LayerwaveError, match=refusal), whole_file(out) as partial:
            partial.write_text("")
        for context in (whole_directory(out), only_run(out)):
            with pytest.raises(LayerwaveError, match=refusal), context:
                pytest.fail("something was written")
        with pytest.raises(LayerwaveError, match=r"out cannot be written \(.+\): name a folder"):
            Lines(out)
    with pytest.raises(LayerwaveError, match="cannot be made a folder"):
        make_folder(places[0])


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    for context in (whole_file(tmp_path / "file"), whole_directory(tmp_path / "directory"), only_run(tmp_path / "run")):
        with pytest.raises(KeyboardInterrupt), context:
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_only_what_belongs_to_an_output_is_swept(tmp_path):
    out = tmp_path / "run"
    (out / "drafts" / ".layerwave-1-5-8").mkdir(parents=True)
    gone = [tmp_path / ".layerwave-123-run", out / ".layerwave-9-metrics.jsonl"]
    names = (".layerwave-123-run2", ".layerwave-123-run.json", ".hidden", ".layerwave-x-run")
    stay = [tmp_path / name for name in names]
    for path in (*gone, *stay, out / "metrics.jsonl"):
        path.touch()
    sweep(out)
    assert sorted(tmp_path.rglob("*")) == sorted([out, out / "drafts", out / "metrics.jsonl", *stay])


HOLD = """
import sys, time
from layerwave.files.lock import only_run
with only_run(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `out`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_takes_over_when_the_first_is_dead(tmp_path, holder):
    out = tmp_path / "out"
    refusal = rf"out is being written by process {holder.pid} on \S+ since \d{{4}}-\S+ \S+: wait for it, stop it, or"
    with pytest.raises(LayerwaveError, match=refusal), only_run(out):
        pytest.fail("there are two")
    with only_run(tmp_path / "other"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "out.lock").exists()
    with only_run(out), pytest.raises(LayerwaveError, match=f"by process {os.getpid()} on "), only_run(out):
        pytest.fail("there are two in one process")
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_another_machine_is_never_taken_over(tmp_path):
    lock = tmp_path / "out.lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2026-01-01 00:00:00"}))
    refusal = f"by process 1 on elsewhere since 2026-01-01 00:00:00: if that process is gone, remove {lock}"
    with pytest.raises(LayerwaveError, match=refusal), only_run(tmp_path / "out"):
        pytest.fail("there are two")
    lock.unlink()
    for torn in (b"", b'{"pid": 1', b"[]", b"\xff"):
        lock.write_bytes(torn)
        with only_run(tmp_path / "out"):
            assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_without_locks_of_the_file_system_the_owner_is_looked_for(tmp_path, holder, monkeypatch):
    """Some network file systems have none; here the system's answer is put in their place."""
    import errno
    import fcntl

    def refuse(*_):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    refusal = f"is being written by process {holder.pid} on "
    with pytest.raises(LayerwaveError, match=refusal), only_run(tmp_path / "out"):
        pytest.fail("there are two")
    holder.kill()
    holder.wait()
    with only_run(tmp_path / "out"):
        pass


RACE = """
import os, sys, time
from pathlib import Path
from layerwave.errors import LayerwaveError
from layerwave.files.lock import only_run
folder = Path(sys.argv[1])
for i in range(200):
    try:
        with only_run(folder / "out"):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            os.unlink(folder / "inside")
    except LayerwaveError:
        pass
"""


def test_of_processes_that_come_and_go_never_two_hold_a_lock(tmp_path):
    racers = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)]
    said = [racer.communicate()[1] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], said
    assert list(tmp_path.iterdir()) == []


SIGNALLED = """
import atexit, os, sys, time
from layerwave import cli
from layerwave.commands.tools import Doctor
from layerwave.files.writing import whole_file

def run(self):
    try:
        with whole_file(sys.argv[1]) as partial:
            partial.write_text("half")
            print("running", flush=True)
            time.sleep(600)
    except KeyboardInterrupt as error:
        if sys.argv[2] == "wrapped":  # as by XLA, when it comes in a callback
            raise RuntimeError("INTERNAL: callback failed") from error
        raise

Doctor.run = run
atexit.register(os.abort)  # as libraries do whose threads are at work when they are taken down
cli.main(["doctor"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("how", ["plain", "wrapped"])
def test_signals_end_a_command_with_one_line_and_their_code(tmp_path, number, code, how):
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path / "out"), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "running\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (code, "layerwave: interrupted; nothing half-written was left\n")
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_does_not_wait(tmp_path):
    code = (
        "import time\nfrom layerwave.interruption import ending_by_signals\n"
        "with ending_by_signals():\n    try:\n        print(1, flush=True); time.sleep(600)\n"
        "    finally:\n        print(2, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    for _ in range(2):
        process.stdout.readline()
        process.terminate()
    assert process.wait(60) == -signal.SIGTERM


WRITE = """
import sys
import numpy as np
from pathlib import Path
from layerwave.files.writing import write_tensors
write_tensors(Path(sys.argv[1]), {"b": np.ones(2), "a": np.zeros(3, np.uint8)}, {name: name for name in "qwertyuiopé"})
"""


def test_the_bytes_of_tensors_follow_from_their_contents(tmp_path):
    """safetensors writes metadata in an order that changes from process to process."""
    paths = [tmp_path / str(i) for i in range(3)]
    for path in paths:
        subprocess.run([sys.executable, "-c", WRITE, str(path)], check=True)
    assert len({path.read_bytes() for path in paths}) == 1
    with safe_open(paths[0], framework="numpy") as file:
        assert file.metadata() == {name: name for name in "qwertyuiopé"}
        np.testing.assert_array_equal(file.get_tensor("b"), np.ones(2))
        np.testing.assert_array_equal(file.get_tensor("a"), np.zeros(3, np.uint8))
