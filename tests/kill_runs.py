"""Kills the long commands at seeded random moments, and holds what the reruns make to an uninterrupted run.

    python -m tests.kill_runs [COMMAND ...] [--kills 20] [--seed 0]

Each command is killed that many times by SIGTERM and as often by SIGKILL, up to five times in one output before it may
finish. Whatever a kill leaves under its final name must be the uninterrupted run's, byte for byte apart from seconds;
so must everything at the end, and nothing else may lie around. pytest does not collect this file (all of it takes
more than an hour); test_kill_runs.py runs a few of its kills.
"""

import argparse
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import layerwave

ASSETS = Path(layerwave.__file__).parent / "assets"
CHAIN = 5
"""Kills of one output before it may finish, at most."""
ENDED = "layerwave: interrupted; nothing half-written was left"
WHOLE = (".safetensors", ".json", ".jsonl", ".png", ".html")
"""Files that are there whole or not at all."""
UNDERWAY = re.compile(r"\.layerwave-|\.(parts|merged)/|checkpoints/|metrics\.jsonl$")
"""What they are not under: names of writers, parts and checkpoints that the next run clears away, logs."""

SAMPLES = "--samples 12 --block 8 --max-length 128 --replicates 2 --fit-positions 200 --score-positions 100"
TRAINING = (
    "--steps 6 --batch-size 2 --max-length 64 --ttt-steps 2 --draft-vocab-size 64 --checkpoint-every 2 --held-out 0.2"
)
ANSWERS = "--depth 2 --top-k 2 --max-new-tokens 8"


@dataclass(frozen=True)
class Case:
    """A command: its arguments, given the folder of inputs and the output; how many processes run it."""

    arguments: Callable[[Path, Path], str]
    out: str
    processes: int = 1


def _calibrate(inputs: Path, out: Path) -> str:
    return f"calibrate mini {inputs / 'conversations.jsonl'} --out {out} {SAMPLES} --batch-tokens 256"


def _validate(inputs: Path, out: Path) -> str:
    stages = {"calibration": SAMPLES, "train": TRAINING, "evaluation": f"--nodes 4 --temperatures 0 {ANSWERS}"}
    flags = " ".join(flags.replace("--", f"--{stage}.") for stage, flags in stages.items())
    layers = "--layers 2,8 --layers 1,6"
    files = f"--conversations {inputs / 'conversations.jsonl'} --questions {inputs / 'questions.jsonl'} --out {out}"
    return f"validate mini {files} {layers} --seeds 2 {flags}"


CASES = {
    "calibrate": Case(_calibrate, "out.safetensors"),
    "distributed": Case(
        lambda inputs, out: f"{_calibrate(inputs, out)} --distributed --shard-batches 1 --heartbeat-seconds 10",
        "out.safetensors",
        processes=2,
    ),
    "distill": Case(
        lambda inputs, out: (
            f"distill mini {inputs / 'conversations.jsonl'} --out {out} --max-new-tokens 8 --batch 2 --temperature 1"
        ),
        "out.jsonl",
    ),
    "train": Case(
        lambda inputs, out: (
            f"train mini {inputs / 'conversations.jsonl'} --layers 5 --layers 2,8 --out {out} {TRAINING}"
        ),
        "run",
    ),
    "evaluate": Case(
        lambda inputs, out: (
            f"evaluate mini {inputs / 'run/drafts/5'} --questions {inputs / 'questions.jsonl'} --out {out} --nodes 4 "
            f"--temperature 1 {ANSWERS}"
        ),
        "out.json",
    ),
    "validate": Case(_validate, "study"),
}


class Failure(AssertionError):
    """A run that does not end as it should, or does not leave what it should."""


@dataclass(frozen=True)
class Ended:
    code: int
    said: str
    seconds: float
    """From its first word on the work itself to its end."""


def environment(cache: Path) -> dict[str, str]:
    """Compiled programs are kept from run to run, so that a start takes seconds."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(layerwave.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }


class Running:
    """The processes of one command, of which one may be killed; the wait begins when it says that its work does."""

    def __init__(self, case: Case, inputs: Path, out: Path, cache: Path):
        command = case.arguments(inputs, out).split()
        if case.processes > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
            command += ["--coordinator", f"127.0.0.1:{self.port}", "--processes", str(case.processes)]
        self.processes, self.said, self.readers = [], [], []
        self.began, self.at = threading.Event(), time.monotonic()
        for k in range(case.processes):
            own = ["--process", str(k)] if case.processes > 1 else []
            process = subprocess.Popen(
                [sys.executable, "-m", "layerwave.cli", *command, *own],
                env=environment(cache),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)
            self.said.append([])
            self.readers.append(threading.Thread(target=self._read, args=(process, self.said[-1])))
            self.readers[-1].start()

    def _read(self, process: subprocess.Popen, said: list[str]) -> None:
        for line in process.stderr:
            said.append(line.rstrip("\n"))
            if line.endswith("…\n") and not self.began.is_set():
                self.at = time.monotonic()
                self.began.set()

    def kill(self, number: int, victim: int, fraction: float, seconds: float) -> None:
        """Of five kills one comes before the work begins."""
        if fraction < 0.2:
            time.sleep(10 * fraction)
        else:
            while not self.began.wait(0.05) and self.processes[victim].poll() is None:
                pass
            time.sleep((fraction - 0.2) / 0.8 * seconds)
        self.processes[victim].send_signal(number)
        if not self.began.is_set():  # the others would wait for it to join: whoever started them ends them
            for process in self.processes[:victim] + self.processes[victim + 1 :]:
                process.kill()

    def wait(self) -> list[Ended]:
        codes = [process.wait(600) for process in self.processes]
        seconds = time.monotonic() - self.at
        for reader in self.readers:
            reader.join()
        return [Ended(code, "\n".join(said), seconds) for code, said in zip(codes, self.said, strict=True)]


def contents(out: Path) -> dict[str, str]:
    """Every file of an output by its name in its folder, as text that two equal runs have in common."""
    found = {}
    for path in sorted(out.parent.rglob("*")):
        name = str(path.relative_to(out.parent))
        if path.is_dir():
            continue
        if checkpoint := re.match(r".*checkpoints/\d+/", name):  # their bytes hold times and random names
            found[checkpoint[0]] = ""
        elif path.name == "seconds.json":
            found[name] = ""
        elif path.suffix in (".json", ".jsonl"):
            found[name] = re.sub(r'"(tokens_per_)?seconds?": ([-+.e\d]+|\{[^}]*\})', '"seconds": 0', path.read_text())
        elif path.suffix == ".html":
            found[name] = _without_seconds(path.read_text())
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _without_seconds(page: str) -> str:
    """A report without its table of seconds, and without speed-ups: the last two columns of the layer sets."""
    page = re.sub(r"<caption>Seconds by stage</caption>.*?</table>", "", page, flags=re.DOTALL)
    sets = re.compile(r"<caption>Layer sets and accepted lengths.*?</table>", re.DOTALL)
    return sets.sub(lambda table: re.sub(r"(<td[^>]*>[^<]*</td>\s*){2}</tr>", "</tr>", table[0]), page)


def whole(name: str) -> bool:
    return name.endswith(WHOLE) and not UNDERWAY.search(name)


def check_killed(ended: Ended, number: int, finished: bool) -> bool:
    """Whether the process was killed, and not done before; Python takes a moment to end."""
    code, said = ended.code, ended.said
    if code == 0 or (code == -number and finished):
        return False
    if number == signal.SIGTERM and code == 143 and said.endswith(ENDED) and "Traceback" not in said:
        return True
    if code == -number and ("…" not in said or number == signal.SIGKILL):  # or before it began to listen
        return True
    raise Failure(f"after signal {number} exit code {code}:\n{said}")


def run_case(name: str, kills: int, folder: Path, seed: int = 0, say: Callable[[str], None] = print) -> None:
    """Kills a command `kills` times by each signal; raises `Failure`."""
    case, inputs, cache = CASES[name], folder / "inputs", folder / "cache"
    dice = random.Random(f"{name} {seed}")

    def finish(out: Path) -> float:
        out.parent.mkdir(exist_ok=True)
        ended = Running(case, inputs, out, cache).wait()
        if any(process.code for process in ended):
            raise Failure("\n".join(f"exit code {process.code}:\n{process.said}" for process in ended))
        return ended[0].seconds

    seconds = finish(reference := folder / f"{name}-whole" / case.out)
    seconds = min(seconds, finish(folder / f"{name}-again" / case.out))  # the first one compiled
    expected = contents(reference)
    if contents(folder / f"{name}-again" / case.out) != expected:
        raise Failure(f"{name}: two uninterrupted runs differ")
    say(f"{name}: {seconds:.1f} s of work, {', '.join(expected)}")

    left = [signal.SIGTERM, signal.SIGKILL] * kills
    dice.shuffle(left)
    chain = spared = 0
    while left:
        out = folder / f"{name}-{chain}" / case.out
        out.parent.mkdir()
        chain, planned = chain + 1, dice.randint(1, min(CHAIN, len(left)))
        done = 0
        while done < planned:
            number, victim, fraction = left[-1], dice.randrange(case.processes), dice.random()
            running = Running(case, inputs, out, cache)
            running.kill(number, victim, fraction, seconds)
            ended, found = running.wait()[victim], contents(out)
            if killed := check_killed(ended, number, finished=found == expected):
                left.pop()
                done += 1
            for path in filter(whole, found):
                if found[path] != expected.get(path):
                    raise Failure(f"{name}, chain {chain}, kill {done}: {path} is not that of an uninterrupted run")
            say(f"{name}: chain {chain}, {signal.Signals(number).name} at {fraction:.2f} of process {victim}: "
                f"{'killed' if killed else 'was done'}, left {', '.join(found) or 'nothing'}")  # fmt: skip
            if not killed:
                spared += 1
                break
        finish(out)
        found = contents(out)
        if found != expected:
            differing = sorted(path for path in found | expected if found.get(path) != expected.get(path))
            raise Failure(f"{name}, chain {chain}: after {done} kills the rerun differs in {differing}")
    say(f"{name}: {2 * kills} kills in {chain} outputs ({spared} came too late), all finished as if there were none")


def make_inputs(folder: Path) -> None:
    """Conversations and questions."""
    (folder / "inputs").mkdir()
    rows = (ASSETS / "conversations.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    # One question each: later turns only take time.
    short = [json.dumps({"messages": json.loads(row)["messages"][:2]}) for row in rows]
    (folder / "inputs" / "conversations.jsonl").write_text("\n".join(short) + "\n", encoding="utf-8")
    asked = [{"question_id": i, "category": "qa", "turns": [f"Is {i} prime?"]} for i in range(1, 7)]
    questions = "".join(json.dumps(row) + "\n" for row in asked)
    (folder / "inputs" / "questions.jsonl").write_text(questions, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", choices=[*CASES, []])
    parser.add_argument("--kills", type=int, default=20, help="by each of the two signals")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for command in options.commands or CASES:
            if command == "evaluate":
                made = Running(CASES["train"], folder / "inputs", folder / "inputs" / "run", folder / "cache").wait()
                if made[0].code:
                    raise Failure(made[0].said)
            started = time.monotonic()
            run_case(command, options.kills, folder, options.seed, lambda text: print(text, flush=True))
            print(f"{command}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
