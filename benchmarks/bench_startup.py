"""Question 7: how long the package takes to start: import, `--help`, the first kernel.

  python benchmarks/bench_startup.py [--repetitions 5] [--out benchmarks/results]

Every start is a process of its own, with warm files; a bare interpreter and an import of torch stand beside them.
Asserts no times.
"""

import subprocess
import sys

from harness import script

from layerwave.bench import Answer, Bar, Side, take_turns

KERNEL = "import numpy, layerwave as lw; lw.cka(numpy.random.default_rng(0).normal(size=(4, 8, 16)))"
SEARCH = "import numpy, layerwave as lw; lw.elsi(lw.Calibration.from_states(numpy.random.rand(6, 8, 16)), size=2)"


def start_up(repetitions: int = 5) -> Answer:
    """Wall seconds of whole processes."""

    def python(name: str, *arguments: str) -> Side:
        return Side(name, lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True))

    timings = take_turns(
        [
            python("an interpreter that does nothing", "-c", "pass"),
            python("import layerwave", "-c", "import layerwave"),
            python("import layerwave with all its rooms", "-c", "from layerwave import *"),
            python("layerwave --help", "-m", "layerwave.cli", "--help"),
            python("the first kernel: CKA of four layers", "-c", KERNEL),
            python("the first search: ELSI of six layers", "-c", SEARCH),
            python("beside them: import torch, import torch_cka", "-c", "import torch, torch_cka"),
        ],
        repetitions,
    )
    return Answer(
        "7. Start-up",
        "Whole processes, files warm",
        tuple(timings),
        (Bar("import layerwave", timings[1].spread, "at most", 2, "s"),),
        notes=("The time of an interpreter that does nothing is in all of them.",),
    )


if __name__ == "__main__":
    script(__doc__, "startup", start_up)
