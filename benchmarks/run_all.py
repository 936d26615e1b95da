"""Every question of the benchmark in one run, and one page with every bar beside what was measured.

  pip install . -r benchmarks/requirements.txt
  python benchmarks/run_all.py [--repetitions 5] [--out benchmarks/results] [--costly]

Writes `results/*.json` and the page `results/README.md`. Questions 1 to 5 and 7 are measured each time, each in a
process of its own. Question 6, the models, takes another 20 minutes and 8 GB: with `--costly` its scripts run as
well, and without it the page has what they last wrote.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from harness import RESULTS, machine, table

from layerwave.bench import Answer, Bar, Spread, tables

HERE = Path(__file__).parent
QUESTIONS = ("entropy", "cka", "conditional_cka", "searches", "growth", "startup")
COSTLY = {
    "calibration": ("--torch-python", sys.executable, "--samples", "8", "--batch-tokens", "512", "--rounds", "5"),
    "train_sets": ("--repeats", "5"),
    "train_step": ("--shape", "half-billion", "--length", "128"),
    "decoding": ("--new", "32", "--rounds", "5"),
}
"""Scripts of question 6 and how they are called."""


def of_models(found: dict[str, dict]) -> Answer:
    """Question 6 from the JSON of its scripts; what they did not write is left out."""

    def ratio(claim: str, script: str, *path: str, sense: str = "at least", limit: float = 1.0) -> list[Bar]:
        values = found.get(script)
        for key in path:
            values = values and values.get(key)
        if values is None:
            return []
        values = values if isinstance(values, list) else [values]
        return [Bar(claim, Spread.of(values), sense, limit, "x", "See the README of the benchmarks.")]

    step, chain = "times torch's tokens/s", "speed-up / tau"
    bars = [
        *ratio("calibration, tokens/s of torch transformers", "calibration", "speed ratios"),
        *ratio("calibration, torch's peak memory", "calibration", "peak ratio", sense="at most", limit=0.7),
        *ratio("eight sets on one pass, time of eight runs", "train_sets", "ratios", sense="at most", limit=0.4),
        *ratio("training step, tokens/s of plain torch", "train_step", step, "layerwave"),
        *ratio("training step that keeps activations, the same", "train_step", step, "layerwave, no remat"),
        *ratio("chain of 3, speed-up over τ", "decoding", "scripted", "3 nodes, top_k 1", chain, limit=0.7),
        *ratio("plain decoding, tokens/s of generate", "decoding", "plain", "batch 1", "layerwave / torch"),
        *ratio("the same, eight sequences", "decoding", "plain", "batch 8", "layerwave / torch"),
        *ratio(
            "a round late in a bucket, time of an early one",
            "decoding",
            "bucket",
            "60 nodes",
            "at 900 / at 520",
            sense="at most",
            limit=1.1,
        ),
    ]
    return Answer("6. Models", "", bars=tuple(bars))


def last_json(text: str) -> dict:
    """The indented object that a script prints at its end."""
    lines = text.splitlines()
    start = max(place for place, line in enumerate(lines) if line == "{")
    return json.loads("\n".join(lines[start:]))


def answer_of(record: dict) -> Answer:
    """The bars of a question, from its JSON."""
    shown = [{key: value for key, value in bar.items() if key != "holds"} for bar in record["bars"]]
    bars = [Bar(**bar | {"measured": Spread(**bar["measured"])}) for bar in shown]
    return Answer(record["question"], record["size"], bars=tuple(bars))


def run(script: str, *options: str) -> str:
    print(f"{time.strftime('%H:%M:%S')} {script}", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / f"bench_{script}.py"), *options]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--costly", action="store_true", help="run the scripts of question 6, too")
    options = parser.parse_args()

    started, before = time.time(), machine()
    given = ("--repetitions", str(options.repetitions), "--out", str(options.out))
    sections = {script: run(script, *given) for script in QUESTIONS}
    seconds = time.time() - started
    for script, arguments in COSTLY.items() if options.costly else ():
        found = {"machine": machine(), **last_json(run(script, *arguments))}
        (options.out / f"{script}.json").write_text(json.dumps(found, indent=1) + "\n")

    records = {path.stem: json.loads(path.read_text()) for path in options.out.glob("*.json")}
    answers = [answer_of(records[script]) for script in QUESTIONS]
    answers.insert(-1, of_models({script: records[script] for script in COSTLY if script in records}))
    rows = [row for answer in answers for row in tables.bar_rows(answer)]
    unmet = sum(len(tables.unmet(answer)) for answer in answers)
    origin = "measured in this run" if options.costly else "read from what its scripts last wrote"
    versions = ", ".join(f"{name} {value}" for name, value in before["versions"].items() if value != "not installed")
    page = [
        "# Every bar beside what was measured",
        f"`python benchmarks/run_all.py` wrote this in {seconds / 60:.1f} minutes, and question 6 was {origin}.",
        f"{before['machine']}; {', '.join(before['devices'].values())}; {versions}. Load at the start "
        f"{before['load']}, BLAS threads {before['BLAS threads']}.",
        f"Medians and ranges of {options.repetitions} repetitions, in which all sides of a question take turns; ratios "
        "are taken repetition by repetition. Compilation is in the first call, which stands apart. Parts of a work are "
        "extrapolated to the whole where the tables say so. What is called literal is written from the definition; "
        "peers are the packages from PyPI, and their values were compared with layerwave's before any time was taken.",
        f"{len(rows) - unmet} of {len(rows)} bars hold.",
        table(tables.BARS, rows),
        *sections.values(),
    ]
    (options.out / "README.md").write_text("\n\n".join(part.strip() for part in page) + "\n")
    print(options.out / "README.md")


if __name__ == "__main__":
    main()
