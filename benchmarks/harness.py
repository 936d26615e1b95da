"""What the scripts of questions 1 to 5 and 7 share: options, the JSON that they write, and tables in Markdown."""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from layerwave.bench import Answer, tables
from layerwave.doctor import examine

RESULTS = Path(__file__).parent / "results"
PEERS = ("torch-cka", "ckatorch", "pytorch-cka")


def script(description: str, name: str, ask: Callable[..., Answer]) -> None:
    """A script's main: asks, prints Markdown, and writes `results/NAME.json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="how often each side is measured, all in turns")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    options = parser.parse_args()
    answer = ask(repetitions=options.repetitions)
    write(answer, options.out / f"{name}.json")
    print(section(answer))


def write(answer: Answer, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **tables.record(answer)}, indent=1) + "\n")


def machine() -> dict:
    """Versions, device, cores and load, as the page names them."""
    found = asdict(examine())
    versions = found["versions"] | {name: _version(name) for name in PEERS}
    return {
        "versions": versions,
        "devices": found["devices"],
        "machine": f"{platform.machine()}, {found['memory']['cores']} cores, {found['memory']['host memory']}",
        "BLAS threads": os.environ.get("OPENBLAS_NUM_THREADS", "as many as cores"),
        "load": round(os.getloadavg()[0], 2),
    }


def section(answer: Answer) -> str:
    """An answer in Markdown: its times, its lines of growth, its bars."""
    parts = [f"## {answer.question}", answer.size + "."]
    if answer.timings:
        parts.append(table(tables.TIMES, tables.time_rows(answer)))
    if answer.lines:
        parts.append(table(tables.LINES, tables.line_rows(answer)))
    parts += answer.notes
    if answer.bars:
        parts.append(table(tables.BARS[1:], [row[1:] for row in tables.bar_rows(answer)]))
    parts += [f"**{bar.claim}** does not hold. {bar.why}" for bar in tables.unmet(answer)]
    return "\n\n".join(parts)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
