"""Question 4: whole searches, one by one and many at once."""

import numpy as np

from layerwave.bench.answer import Answer, Bar
from layerwave.bench.states import random_states
from layerwave.bench.timing import Side, take_turns
from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import gram
from layerwave.selection import elsi, elsi_c, exhaustive
from layerwave.selection.beam import Level, beam_search, every_other_layer
from layerwave.selection.stability import entropy_in_problems

_BEAM, _SIZE = 10, 3


def searches(
    layers: int = 36,
    rows: int = 32,
    features: int = 2560,
    *,
    problems: int = 1000,
    alone: int = 20,
    repetitions: int = 5,
) -> Answer:
    """ELSI, ELSI-C and the exhaustive search of three layers from block-averaged states; many ELSI problems at once.

    The problems are Grams of one shape; `alone` of them are searched one by one and extrapolated. Raises
    `LayerwaveError` when a problem has another choice alone than among all.
    """
    calibration = Calibration.from_states(random_states(layers, rows, features))
    grams = np.stack([gram(random_states(layers, rows, rows, seed).astype(np.float64)) for seed in range(problems)])
    alone = min(alone, problems)

    def together() -> Level:
        return _search(grams)

    def one_by_one() -> list[Level]:
        return [_search(grams[problem : problem + 1]) for problem in range(alone)]

    def check(results: list) -> None:
        at_once, alone = results[3:]
        for problem, (choice, expected) in enumerate(zip(at_once.sets, alone, strict=False)):
            if not np.array_equal(choice, expected.sets[0]):
                raise LayerwaveError(f"problem {problem} has the choice {choice} at once, {expected.sets[0]} alone")

    timings = take_turns(
        [
            Side("ELSI", lambda: elsi(calibration, _SIZE)),
            Side("ELSI-C", lambda: elsi_c(calibration, _SIZE)),
            Side("exhaustive", lambda: exhaustive(calibration, _SIZE)),
            Side(f"{problems:,} ELSI problems at once, from Grams", together),
            Side(f"{problems:,} ELSI problems one by one, from Grams", one_by_one, alone / problems),
        ],
        repetitions,
        check,
    )
    by_elsi, by_elsi_c, _, at_once, apart = timings
    why = "Both spend their time in the same LAPACK calls, one for each set that is scored."
    return Answer(
        "4. Searches for three layers",
        f"{layers} layers, {rows} rows, {features:,} features, beam {_BEAM}",
        tuple(timings),
        (
            Bar("ELSI", by_elsi.spread, "at most", 0.3, "s"),
            Bar("ELSI-C", by_elsi_c.spread, "at most", 0.2, "s"),
            Bar(f"throughput of {problems:,} problems at once", apart.times(at_once), "at least", 1, "x", why),
        ),
        notes=(f"One by one {alone} problems are searched, and extrapolated.",),
    )


def _search(grams: np.ndarray) -> Level:
    problems, layers = grams.shape[:2]
    score, propose = entropy_in_problems(grams, 1.0), every_other_layer(layers)
    return beam_search(score, propose, layers, _SIZE, _BEAM, _BEAM, num_problems=problems)[1]
