"""ELSI and ELSI-C: one beam over layer sets with two ways to propose the next layer (paper section 4).

The same search runs for one calibration and for a batch of problems that share the layers, such as the bootstrap
replicates of one calibration: all extensions of all beams of a depth are scored in one call, and ELSI-C takes all
conditional CKA matrices of a depth in another. Sets of all problems stand in one list, each with its problem's number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Integer

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import conditional_cka_from_table, gram_table, transitions
from layerwave.selection.criteria import Criterion, layer_states
from layerwave.selection.near_ties import NEAR_ELSEWHERE, Beam, Remembered, nearness, warn_of_near_ties
from layerwave.selection.result import Layers, Selection, as_beam
from layerwave.selection.scores import make_criterion
from layerwave.selection.sets import check_count, check_size, eligible, place_in_group, ranking
from layerwave.warned import warn, warnings_kept

# Transitions below this are rounding: float64 leaves errors of about 1e-15 in each of the N entries of a row of M.
_NO_TRANSITION = 1e-13

# Scores of sets, each in its problem, greater is better: problems (M,), sets (M, d) -> scores (M,).
Score: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]
# Which layers to try next for each set: problems (M,), sets (M, d) -> mask (M, N), False at the sets' own layers.
Proposal: TypeAlias = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Level:
    """The kept sets of one depth: problem after problem, best first in each.

    `parents` are the places in the level before from which a set was reached.
    """

    problems: Integer[np.ndarray, "M"]
    sets: Integer[np.ndarray, "M d"]
    scores: Float[np.ndarray, "M"]
    parents: tuple[tuple[int, ...], ...]

    def best(self, count: int) -> "Level":
        """The first `count` sets of each problem."""
        kept = np.flatnonzero(place_in_group(self.problems) < count)
        return Level(self.problems[kept], self.sets[kept], self.scores[kept], tuple(self.parents[i] for i in kept))


def seeds(score: Score, num_layers: int, num_problems: int) -> Level:
    """All single layers: the first level before its cut."""
    problems = np.repeat(np.arange(num_problems), num_layers)
    sets = np.tile(np.arange(num_layers), num_problems)[:, None]
    scores = score(problems, sets)
    order = ranking(scores, sets, problems)
    return Level(problems[order], sets[order], scores[order], ((),) * len(order))


def grow(score: Score, proposed: Bool[np.ndarray, "M N"], level: Level, beam: int, expand: int) -> Level:
    """One step: score every proposed extension, keep each set's best `expand`, pool, drop duplicates, prune."""
    parent, layer = np.nonzero(proposed)
    extended = np.sort(np.column_stack([level.sets[parent], layer]), axis=1)
    rows, index = np.unique(np.column_stack([level.problems[parent], extended]), axis=0, return_inverse=True)
    index = index.reshape(-1)
    problems, sets = rows[:, 0], rows[:, 1:]
    scores = score(problems, sets)
    edges = ranking(scores[index], extended, parent)
    edges = edges[place_in_group(parent[edges]) < expand]
    pool = np.unique(index[edges])
    order = pool[ranking(scores[pool], sets[pool], problems[pool])]
    order = order[place_in_group(problems[order]) < beam]
    parents = tuple(tuple(sorted(parent[edges[index[edges] == node]].tolist())) for node in order)
    return Level(problems[order], sets[order], scores[order], parents)


def beam_search(
    score: Score, propose: Proposal, num_layers: int, size: int, beam: int, expand: int, num_problems: int = 1
) -> tuple[list[Level], Level]:
    """The levels of all depths, and the choice of every problem."""
    singles = seeds(score, num_layers, num_problems)
    levels = [singles.best(beam)]
    while len(levels) < size:
        level = levels[-1]
        levels.append(grow(score, propose(level.problems, level.sets), level, beam, expand))
    # With one layer the best may be shut out by the rule of the middle, and the next lie below the cut.
    last = singles if size == 1 else levels[-1]
    allowed = np.flatnonzero(eligible(last.sets, num_layers))
    choice = allowed[place_in_group(last.problems[allowed]) == 0]
    return levels, Level(last.problems[choice], last.sets[choice], last.scores[choice], ((),) * len(choice))


def held_back(score: Score, levels: list[Level], near: float) -> Score:
    """The score with the sets of these levels set back by `near`: what they beat by less comes before them."""
    kept = {tuple(row) for level in levels for row in level.sets.tolist()}
    return lambda problems, sets: score(problems, sets) - near * np.array([tuple(row) in kept for row in sets.tolist()])


def every_other_layer(num_layers: int) -> Proposal:
    """ELSI's proposal: all layers that are not in the set."""

    def propose(problems: Integer[np.ndarray, "M"], sets: Integer[np.ndarray, "M d"]) -> Bool[np.ndarray, "M N"]:
        mask = np.ones((len(sets), num_layers), dtype=bool)
        np.put_along_axis(mask, sets, False, axis=1)
        return mask

    return propose


def greatest_transitions(tables: Float[np.ndarray, "R N N"], pool: int, *, turn: float = 0.0) -> Proposal:
    """ELSI-C's proposal: the `pool` layers of greatest conditional transition (paper eq. 8).

    `δ_L(l) = ‖M_L(l,:) - M_L(l-1,:)‖₂` with `δ_L(0) = 0`; ties go to the smaller layer. All sets of a problem share its
    table `A` of centred Gram products, so no states are needed. Where the cut falls between transitions that differ by
    less than `turn` times the greatest, the other ones are proposed.
    """

    def greatest(delta: Float[np.ndarray, "M N"]) -> Bool[np.ndarray, "M N"]:
        row, layer = np.indices(delta.shape).reshape(2, -1)
        order = ranking(delta.reshape(-1), layer[:, None], row)
        kept = order[place_in_group(row[order]) < pool]
        mask = np.zeros(delta.shape, dtype=bool)
        mask[row[kept], layer[kept]] = True
        return mask

    def propose(problems: Integer[np.ndarray, "M"], sets: Integer[np.ndarray, "M d"]) -> Bool[np.ndarray, "M N"]:
        delta = np.pad(transitions(conditional_cka_from_table(tables, sets, problems)), ((0, 0), (1, 0)))
        if not turn:  # it has been said
            _warn_of_lost(delta, sets)
        delta = _relative(delta)
        np.put_along_axis(delta, sets, -1.0, axis=1)  # a layer of the set itself ranks below every other
        mask = greatest(delta)
        if turn:
            mask = greatest(delta - turn * mask)
        return mask & (delta >= 0)

    return propose


def _relative(delta: Float[np.ndarray, "M N"]) -> Float[np.ndarray, "M N"]:
    """Transitions as fractions of each set's greatest one, so that ties mean the same at every size of them.

    When a member of `L` outweighs all other layers, `M_L` is 1 to the last digits of float64, and what is left of `δ_L`
    is rounding: then all are tied at 0.
    """
    greatest = delta.max(axis=1, keepdims=True)
    return np.where(greatest < _NO_TRANSITION, 0.0, delta / np.maximum(greatest, _NO_TRANSITION))


def _warn_of_lost(delta: Float[np.ndarray, "M N"], sets: Integer[np.ndarray, "M d"]) -> None:
    greatest = delta.max(axis=1)
    lost = greatest < _NO_TRANSITION
    if lost.any():
        warn(
            f"no conditional transition is left given layers {sets[np.argmax(lost)].tolist()} (greatest: "
            f"{greatest[np.argmax(lost)]:.0e}): ELSI-C takes the first layers there; weighting 'trace' makes layers "
            "weigh the same"
        )


def elsi(
    calibration: Calibration,
    size: int = 3,
    beam: int = 10,
    expand: int = 10,
    alpha: float = 1.0,
    *,
    weighting: str = "raw",
    objective: Literal["max", "min"] = "max",
    criterion: str | Criterion = "entropy",
) -> Selection:
    """ELSI: the layer set of greatest matrix entropy, by beam search (paper section 4).

    Args:
        calibration: block-averaged states of the N layers.
        size: number of layers m, 1 … N. A single layer must lie after the middle (`l > N // 2`).
        beam: sets kept at each depth.
        expand: extensions that each set of the beam may contribute.
        alpha: order of the Rényi entropy, > 0 or inf.
        weighting: `raw` (the paper), or `trace`: every layer's Gram divided by its trace.
        objective: `max`; `min` turns the same beam around, which gives the low-entropy control.
        criterion: `entropy`, or a function of sorted sets, integers (M, m) -> floats (M,), greater is better.

    Returns:
        The `Selection`, with the beams of all depths; scores of the entropy in nats.

    Raises:
        LayerwaveError: for options out of range and for states that are all zero or not finite.
    """
    expand = check_count("expand", expand)
    if objective not in ("max", "min"):
        raise LayerwaveError(f"objective is {objective!r}: choose max or min")
    return _search(
        calibration,
        "elsi" if objective == "max" else "low_entropy",
        lambda turn: every_other_layer(calibration.num_layers),
        (criterion, alpha, weighting),
        size,
        beam,
        expand,
        settings={"expand": expand},
        sign=1 if objective == "max" else -1,
    )


def elsi_c(
    calibration: Calibration,
    size: int = 3,
    beam: int = 10,
    pool: int = 5,
    alpha: float = 1.0,
    *,
    weighting: str = "raw",
    estimator: Literal["biased", "debiased"] = "biased",
    criterion: str | Criterion = "entropy",
) -> Selection:
    """ELSI-C: ELSI's beam, extended only by the layers of greatest conditional CKA transition (paper section 4).

    Args:
        calibration: block-averaged states of the N layers.
        size, beam, alpha, weighting, criterion: as in `elsi`; seeds, scores and pruning are the same.
        pool: layers of greatest transition that are tried from each set.
        estimator: of the CKA: `biased` (the paper), or `debiased` (B >= 4).

    Raises:
        LayerwaveError: as `elsi`; also for a layer whose states are the same at every position, where CKA is undefined.
    """
    pool = check_count("pool", pool)
    table = gram_table(layer_states(calibration, weighting), estimator)
    return _search(
        calibration,
        "elsi_c",
        lambda turn: greatest_transitions(table[None], pool, turn=turn),
        (criterion, alpha, weighting),
        size,
        beam,
        expand=calibration.num_layers,  # the pool alone limits the extensions
        settings={"pool": pool, "estimator": estimator},
    )


def _search(calibration, method, propose, scoring, size, beam, expand, settings, sign=1) -> Selection:
    num_layers = calibration.num_layers
    size, beam = check_size(size, num_layers), check_count("beam", beam)
    with warnings_kept() as warnings:
        name, criterion = make_criterion(calibration, *scoring)
        remembered = Remembered(criterion)

        def score(_, sets):
            return sign * remembered(sets)

        levels, choice = beam_search(score, propose(0.0), num_layers, size, beam, expand)
        behind = held_back(score, levels[:-1], nearness(name))
        turned = beam_search(behind, propose(NEAR_ELSEWHERE), num_layers, size, beam, expand)
        layers, beams = _found(levels, choice, sign)
        warn_of_near_ties(layers, beams, name, _found(*turned, sign))
    _, alpha, weighting = scoring
    return Selection(
        method=method,
        layers=layers,
        score=sign * float(choice.scores[0]),
        num_layers=num_layers,
        calibration=calibration.fingerprint,
        criterion=name,
        settings={"size": size, "beam": beam, **settings, "alpha": alpha, "weighting": weighting},
        beams=beams,
        parents=tuple(level.parents for level in levels),
        warnings=tuple(warnings),
    )


def _found(levels: list[Level], choice: Level, sign: int) -> tuple[Layers, tuple[Beam, ...]]:
    """The choice and the beams of a search, as a `Selection` holds them."""
    return tuple(choice.sets[0].tolist()), tuple(as_beam(level.sets, sign * level.scores) for level in levels)
