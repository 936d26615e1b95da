"""What all commands share: tables and JSON on stdout, progress on stderr, and checks of the paths a user names."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, arg

from layerwave.errors import LayerwaveError

Json = FlagCreatePairsOff[Annotated[bool, arg(help="Print the result as JSON instead of a table.")]]


def parse_layers(text: str, what: str = "layers", example: str = "5,23,35") -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise LayerwaveError(
            f"{what} {text!r} are not whole numbers between commas; write for example {example}"
        ) from None


def check_out(out: Path, *inputs: Path) -> None:
    """Refuses before the long work what could not, or should not, be written after it."""
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise LayerwaveError(f"{out} cannot be written: name a file in a folder that exists and is writable")
    if out.exists() and any(path.exists() and path.samefile(out) for path in inputs):
        raise LayerwaveError(f"{out} is an input as well and would be lost: give another --out")


def progress_bar(title: str):
    from layerwave.progress import Progress

    return Progress(title)


def table_of(*columns: str):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_table(table) -> None:
    from rich.console import Console

    # No markup: cells hold text from files, in which brackets are brackets.
    terminal = Console(highlight=False, markup=False, emoji=False)
    # Without a terminal rich assumes 80 columns and would fold; a file takes lines of any length.
    console = terminal if terminal.is_terminal else Console(highlight=False, markup=False, emoji=False, width=200)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


def join(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def interval(bounds: tuple[float, float], digits: int = 2) -> str:
    low, high = bounds
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def estimated(estimate, digits: int = 2, sign: str = "-") -> str:
    """A value, and its interval where it has one; with `sign="+"` it shows that it is a difference."""
    bounds = "" if estimate.low is None else f" {interval((estimate.low, estimate.high), digits)}"
    return f"{estimate.value:{sign}.{digits}f}{bounds}"
