"""Question 5: time against the number of layers, the size of sets, the rows and the beam."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

import numpy as np
from jaxtyping import Int

from layerwave.bench.answer import Answer, Line
from layerwave.bench.states import random_states
from layerwave.bench.timing import Side, take_turns
from layerwave.calibration import Calibration
from layerwave.kernels import cka, conditional_cka_from_table, gram, gram_table, set_entropy
from layerwave.selection import elsi

Work = Callable[[], object]


def growth(
    *,
    num_layers: int = 36,
    num_rows: int = 32,
    features: int = 2560,
    layers: Sequence[int] = (16, 32, 64, 128),
    sizes: Sequence[int] = (1, 2, 3, 4, 5),
    rows: Sequence[int] = (16, 32, 64, 128, 256),
    beams: Sequence[int] = (5, 10, 20, 40),
    repetitions: int = 5,
) -> Answer:
    """Time of the parts of a search as one size grows, with the exponent fitted to it.

    `num_layers` and `num_rows` hold where they are not varied.
    """

    def similarity(layers: int) -> Work:
        return partial(cka, random_states(layers, num_rows, features))

    def pairs(layers: int) -> Work:
        return _entropies(layers, num_rows, np.array(list(combinations(range(layers), 2))))

    def conditional(layers: int) -> Work:
        table = gram_table(random_states(layers, num_rows, num_rows))
        return partial(conditional_cka_from_table, table, _drawn_sets(40, layers, 2))

    def sets_of(size: int) -> Work:
        return _entropies(num_layers, num_rows, _drawn_sets(1024, num_layers, size))

    def spectra(rows: int) -> Work:
        return _entropies(num_layers, rows, _drawn_sets(64, num_layers, 2))

    def products(rows: int) -> Work:
        return partial(gram, random_states(8, rows, features))

    def search(layers: int = num_layers, size: int = 3, beam: int = 10) -> Work:
        calibration = Calibration.from_states(random_states(layers, num_rows, num_rows))
        return partial(elsi, calibration, size, beam=beam, expand=layers)

    lines = [
        ("CKA of all pairs against N", "1: a Gram a layer", layers, similarity),
        ("entropies of all pairs against N", "2: N² / 2 spectra", layers, pairs),
        ("conditional CKA of 40 sets against N", "2: N² products a set", layers, conditional),
        ("ELSI of three layers against N", "1: beam x N sets", layers, search),
        ("entropies of 1,024 sets against m", "0: one spectrum a set", sizes, sets_of),
        ("ELSI against m", "1: beam x N sets for each further layer", sizes, lambda m: search(size=m)),
        ("entropies of 64 sets against B", "3: LAPACK's tridiagonal form", rows, spectra),
        ("Grams of 8 layers against B", "2: B² D products", rows, products),
        ("ELSI of three layers against the beam", "1: beam x N sets", beams, lambda beam: search(beam=beam)),
    ]
    return Answer(
        "5. Growth",
        f"{num_layers} layers, {num_rows} rows and {features:,} features where not varied",
        lines=tuple(_line(*line, repetitions) for line in lines),
        notes=(
            "What does not grow (calls, launches of compiled programs) flattens a line at its small sizes. So do sets "
            "that a beam reaches twice and scores once.",
        ),
    )


def _entropies(layers: int, rows: int, sets: Int[np.ndarray, "M m"]) -> Work:
    return partial(set_entropy, gram(random_states(layers, rows, rows).astype(np.float64)), sets)


def _drawn_sets(count: int, layers: int, size: int) -> Int[np.ndarray, "{count} {size}"]:
    return np.argsort(np.random.default_rng(0).random((count, layers)), axis=1)[:, :size]


def _line(name: str, expected: str, sizes: Sequence[int], side: Callable[[int], Work], repetitions: int) -> Line:
    timings = take_turns([Side(f"{size}", side(size)) for size in sizes], repetitions)
    return Line(name, expected, tuple(sizes), tuple(timings))
