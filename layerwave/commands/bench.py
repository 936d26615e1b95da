"""`layerwave bench`."""

import dataclasses
import sys
from dataclasses import dataclass

from layerwave.commands.printing import Json, print_json, print_table, table_of


@dataclass(frozen=True)
class Bench:
    """Measure how fast this device answers, beside literal ways and numpy: about a minute on two cores."""

    layers: int = 36
    """Layers of the target."""
    rows: int = 32
    """Rows of its block-averaged states."""
    features: int = 2560
    """Its hidden size."""
    repetitions: int = 5
    """Times that every side is measured, all sides in turns."""
    json: Json = False

    def run(self) -> None:
        from layerwave.bench import tables
        from layerwave.bench.questions import quick_answers
        from layerwave.doctor import examine

        machine, answers = examine(), []
        for answer in quick_answers(self.layers, self.rows, self.features, self.repetitions):
            print(f"measured: {answer.question}", file=sys.stderr, flush=True)
            answers.append(answer)
        if self.json:
            print_json({"machine": dataclasses.asdict(machine), "answers": [tables.record(a) for a in answers]})
            return
        for answer in answers:
            print(f"{answer.question}: {answer.size}")
            columns, rows = (tables.LINES, tables.line_rows) if answer.lines else (tables.TIMES, tables.time_rows)
            _print(columns, rows(answer))
            print("".join(f"{note}\n" for note in answer.notes), end="")
        _print(tables.BARS, [row for answer in answers for row in tables.bar_rows(answer)])
        found = machine.versions | machine.devices | machine.memory
        print(", ".join(f"{name} {value}" for name, value in found.items()))


def _print(columns, rows) -> None:
    table = table_of(*columns)
    for row in rows:
        table.add_row(*row)
    print_table(table)
