"""Validations with planted answers: what a criterion that knows the drafts' true acceptance looks like, and others."""

import numpy as np

from layerwave.decoding.evaluation import EvaluatedDraft, Evaluation, EvaluationSettings, Row, Run
from layerwave.decoding.questions import COLUMN_OF
from layerwave.validation.result import Candidate, Stage, Standing, Validation

SETS = (
    *((l,) for l in (2, 5, 8, 11)),
    *((2, 9), (0, 1), (5, 11), (3, 9), (6, 10)),
    *((2, 6, 9), (0, 1, 2), (5, 8, 11), (6, 7, 10), (1, 5, 8), (2, 6, 10), (0, 4, 9), (3, 7, 11)),
)
NAMES = {
    (11,): ("eagle2", "acceptance"),
    (8,): ("elsi", "exhaustive"),
    (0, 1): ("low_entropy",),
    (5, 11): ("acceptance",),
    (6, 10): ("elsi", "elsi_c", "exhaustive"),
    (3, 9): ("uniform",),
    (2, 6, 9): ("eagle3",),
    (0, 1, 2): ("low_entropy",),
    (5, 8, 11): ("acceptance",),
    (6, 7, 10): ("elsi", "exhaustive"),
    (1, 5, 8): ("eagle3_engine",),
    (2, 6, 10): ("uniform",),
}
QUALITY = np.linspace(2.0, 2.8, len(SETS))[np.random.default_rng(3).permutation(len(SETS))]
"""True τ of each set."""


def planted_validation(
    seeds: int = 3, *, noise: float = 0.04, rounds: int = 60, per_category: int = 2, nodes=(30, 60), temperatures=(0.0,)
) -> Validation:
    """Drafts whose τ is `QUALITY`, with noise of training and of questions.

    Criteria: `acceptance` orders as the truth does; `entropy` has nothing to do with it; `effective_rank` orders as the
    entropy does; `backwards` is the truth turned around; `dpp` scores single layers alike.
    """
    rng = np.random.default_rng(0)
    categories = tuple(category for category in COLUMN_OF for _ in range(per_category))
    settings = EvaluationSettings(nodes=nodes, temperatures=temperatures, max_new_tokens=256)
    drafts = tuple(
        EvaluatedDraft("-".join(map(str, layers)), layers, f"{place:04x}") for place, layers in enumerate(SETS)
    )
    hard = rng.normal(0, 0.3, len(categories))
    trained = QUALITY + noise * rng.normal(size=(seeds, len(SETS)))
    evaluations = []
    for own in trained:
        runs = []
        for temperature in temperatures:
            runs.append(Run(None, None, temperature, tuple(row(rng, rounds * 2.5, 1.0) for _ in categories)))
            for draft, quality in zip(drafts, own, strict=True):
                runs += [
                    Run(draft.name, size, temperature, tuple(row(rng, rounds, quality + size / 300 + h) for h in hard))
                    for size in nodes
                ]
        evaluations.append(
            Evaluation(
                "planted", "0123", "float32", "cpu", drafts, settings, "4567",
                tuple(range(len(categories))), categories, tuple(runs),
            )
        )  # fmt: skip
    entropy = rng.permutation(len(SETS)) / len(SETS)
    scores = {
        "entropy": entropy,
        "acceptance": QUALITY / 8,
        "effective_rank": np.exp(entropy),
        "backwards": -QUALITY,
        "dpp": np.array([0.0 if len(layers) == 1 else rng.normal() for layers in SETS]),
    }
    candidates = tuple(
        Candidate(
            layers,
            NAMES.get(layers, ("random",)),
            {name: float(values[place]) for name, values in scores.items()},
            float(0.7 * entropy[place]),
            float(0.3 * entropy[place]),
        )
        for place, layers in enumerate(SETS)
    )
    return Validation(
        target="planted",
        target_fingerprint="0123",
        calibration="89ab",
        data="cdef",
        settings={"seeds": seeds, "sizes": [1, 2, 3]},
        candidates=candidates,
        seeds=tuple(range(seeds)),
        evaluations=tuple(evaluations),
        held_out=tuple(map(tuple, (trained / 4).tolist())),
        notes=(),
        stages=planted_stages(),
        cost={"trained": 1700, "full": 5100},
        seconds={"calibrate": 20.0, "train": 600.0},
    )


def row(rng: np.random.Generator, rounds: float, tau: float) -> Row:
    """A question with about so many rounds of τ tokens on average."""
    count = 1 + rng.poisson(rounds)
    kept = rng.poisson(max(tau - 1, 0), size=count).clip(max=7)
    lengths = np.bincount(kept, minlength=8)
    emitted = int(count + kept.sum())
    return Row(
        tokens=emitted + 1,
        emitted=emitted,
        accepted=tuple(lengths.tolist()),
        drafted=count * 7,
        seconds=float(0.01 * count),
        stops={"end_token": 1},
        empty=0,
        differing=(),
        ended="",
    )


def planted_stages() -> tuple[Stage, ...]:
    """A cascade in which half of the sets leave at each of three stages."""
    rng = np.random.default_rng(1)
    stages, left = [], np.arange(len(SETS))
    for measure, steps, noise in (
        ("predicted acceptance", 0, 0.2), ("held-out acceptance", 100, 0.1), ("held-out acceptance", 300, 0.05)
    ):  # fmt: skip
        values = (QUALITY[left] + noise * rng.normal(size=len(left))) / 4
        order = np.argsort(-values)
        left, values = left[order], values[order]
        stay = max(1, len(left) // 2)
        standings = tuple(
            Standing(
                SETS[place],
                float(value),
                float(value - values[0]),
                None if steps == 0 else noise / 4,
                rank < stay,
                "among the best half" if rank < stay else "behind by more than two errors",
            )
            for rank, (place, value) in enumerate(zip(left.tolist(), values.tolist(), strict=True))
        )
        stages.append(Stage(measure, steps, standings))
        left = left[:stay]
    return tuple(stages)
