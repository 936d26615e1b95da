"""How often the intervals, verdicts and regrets of the report card are right, in simulated validations.

    python benchmarks/report_card_coverage.py [--studies 300]

Sets have a true τ of a given spread; drafts vary with their seed, and questions favour some sets. Criteria: two that
are as good as each other (`entropy`, `equal`), one that is better, and one of no use. Over many studies, in percent:

- measurements: 95 % intervals over seeds and questions that hold the mean correlation of such measurements of the sets
- sets: 95 % intervals over sets that hold the mean correlation over sets and measurements
- false, true: verdicts `better` or `worse` on the equally good criterion (at most 5 were good), `better` on the better
- ceiling: mean noise ceiling beside the mean correlation of the true τ with the measured one
- regret: mean of the choice by the useless criterion, held out and as measured, beside the mean true regret
"""

import argparse

import numpy as np
from scipy.stats import spearmanr

from layerwave.validation.accepted import Accepted, as_measured, average
from layerwave.validation.report_card import report_card

LOADS = {"entropy": 0.5, "equal": 0.5, "better": 0.9, "useless": 0.0}
COLUMNS = ("CODING", "EXTR", "HUMAN", "QA", "RAG", "ROLE", "STEM", "SUMM", "TRANSL", "WRITING", "M/R", "M/R", "M/R")
ROUNDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=300)
    parser.add_argument("--resamples", type=int, default=400)
    options = parser.parse_args()
    print("sets seeds spread | measurements sets | false true | ceiling (true) | regret: held out, as measured (true)")
    for sets, seeds, spread in ((8, 3, 0.05), (16, 1, 0.1), (16, 3, 0.05), (16, 3, 0.1), (24, 3, 0.1)):
        rng = np.random.default_rng(0)
        studies = [study(rng, sets, seeds, spread, options.resamples) for _ in range(options.studies)]
        print(f"{sets:4} {seeds:5} {spread:6.2f} | {summary(studies)}", flush=True)


def study(rng: np.random.Generator, sets: int, seeds: int, spread: float, resamples: int) -> dict:
    quality = rng.normal(size=sets)
    scores = {name: load * quality + np.sqrt(1 - load**2) * rng.normal(size=sets) for name, load in LOADS.items()}
    true = 2.5 + spread * quality
    again = [average(measured, as_measured(measured))[0] for measured in (measure(rng, true, seeds) for _ in range(40))]
    group = report_card(measure(rng, true, seeds), scores, np.full(sets, 3), resamples=resamples).groups[0]
    return {
        "card": group,
        "again": {
            name: np.mean([spearmanr(values, taus).statistic for taus in again]) for name, values in scores.items()
        },
        "ceiling": np.mean([spearmanr(true, taus).statistic for taus in again]),
        "regret": true.max() - true[np.argmax(scores["useless"])],
    }


def measure(rng: np.random.Generator, true: np.ndarray, seeds: int) -> Accepted:
    """Two questions a category; the noise of training is 0.04, that of a question for a set 0.12."""
    questions = 2 * len(COLUMNS)
    own = true[:, None] + 0.04 * rng.normal(size=(seeds, len(true), 1)) + 0.12 * rng.normal(size=(len(true), questions))
    own = own + 0.3 * rng.normal(size=questions)
    rounds = np.full(own.shape, ROUNDS)
    emitted = rounds + rng.poisson(ROUNDS * np.maximum(own - 1, 0))
    return Accepted(60, 0.0, emitted, rounds, np.ones(own.shape), np.ones((seeds, questions)), COLUMNS * 2, 0)


def summary(studies: list[dict]) -> str:
    mean = {name: np.mean([found["again"][name] for found in studies]) for name in LOADS}
    here = [holds(f["card"][name].spearman.over_measurements, f["again"][name]) for f in studies for name in LOADS]
    elsewhere = [holds(f["card"][name].spearman.over_sets, mean[name]) for f in studies for name in LOADS]
    false = np.mean([found["card"]["equal"].verdict in ("better", "worse") for found in studies])
    true = np.mean([found["card"]["better"].verdict == "better" for found in studies])
    ceiling = [(found["card"].ceiling, found["ceiling"]) for found in studies]
    regrets = [(found["card"]["useless"].regret, found["regret"]) for found in studies]
    held_out, measured = (np.mean([getattr(regret, name) for regret, _ in regrets]) for name in ("value", "measured"))
    return (
        f"{100 * np.mean(here):12.0f} {100 * np.mean(elsewhere):4.0f} | {100 * false:5.0f} {100 * true:4.0f} | "
        f"{np.mean([own for own, _ in ceiling]):.2f} ({np.mean([own for _, own in ceiling]):.2f}) | "
        f"{held_out:.3f}, {measured:.3f} ({np.mean([own for _, own in regrets]):.3f})"
    )


def holds(interval: tuple[float, float] | None, value: float) -> bool:
    return interval is not None and interval[0] <= value <= interval[1]


if __name__ == "__main__":
    main()
