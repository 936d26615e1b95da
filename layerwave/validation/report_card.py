"""The report card: how well each criterion ranks layer sets by the τ of their drafts, and what choosing by it costs.

A criterion *predicts τ better* than raw `S_1` where both intervals of the paired difference of their Spearman
correlations are above 0, that over measurements and that over sets (see `correlations`). Other sets decide it: of two
criteria that are as good in general, one is almost always better on the very sets at hand, and often beyond the noise
of their τ. Nothing is corrected for the number of criteria.

Sets that criteria chose are not a random sample: those that a criterion chose for its extremes help its correlation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from layerwave.decoding.tau import RESAMPLES, Estimate
from layerwave.errors import LayerwaveError
from layerwave.validation.accepted import (
    Accepted,
    accepted_lengths,
    as_measured,
    average,
    estimates,
    from_mean,
    resample,
    varies,
)
from layerwave.validation.correlations import EQUAL, LEAST, Correlation, compared_sets, correlate, resampled_sets
from layerwave.validation.ranks import Strata
from layerwave.validation.regret import Halves, Regret, ceiling, halves, regret
from layerwave.validation.result import Validation

REFERENCE = "entropy"
"""The criterion that others are compared with: raw `S_1`, the paper's."""

ALL, WITHIN = "all sets", "within sizes"
"""Groups of sets beside those of one size: the second takes all, each compared with those of its size only."""

PARTS = ("informativeness", "diversity")
"""Of `S_1`."""

TRAINED = "held-out acceptance"
"""Of the trained drafts' first step: no criterion, but what one can be compared with."""


@dataclass(frozen=True)
class CriterionCard:
    """One criterion in one group of sets."""

    criterion: str
    spearman: Correlation
    kendall: Correlation
    """Kendall's coefficient (τ-b, which is not the τ of accepted lengths)."""
    beside: Correlation
    """Its Spearman correlation minus that of `REFERENCE`, paired."""
    choice: tuple[int, ...]
    """Places of the sets of greatest score: one, or those that share it."""
    regret: Regret | None
    """Of its choice; None where the sizes are taken each by itself."""

    @property
    def verdict(self) -> str:
        """Against `REFERENCE`: `better`, `worse`, either with ` on these sets` where other sets could turn it, `not
        told apart`, or nothing where there is no comparison."""
        if self.beside.value is None:
            return ""
        here, elsewhere = self.beside.side
        if here == 0:
            return "not told apart"
        return ("better" if here > 0 else "worse") + ("" if elsewhere == here else " on these sets")


@dataclass(frozen=True)
class GroupCard:
    """All criteria in one group of sets."""

    name: str
    """`ALL`, `WITHIN`, `1 layer`, `2 layers`, …"""
    members: tuple[int, ...]
    """Places of the sets."""
    best: int
    """Place of the set of greatest measured τ."""
    ceiling: float | None
    """About the Spearman correlation of the true τ with the measured one; None of a single question or too few sets."""
    criteria: tuple[CriterionCard, ...]
    chance: Regret | None
    """Of a set drawn from the group; None where the sizes are taken each by itself."""

    def __getitem__(self, criterion: str) -> CriterionCard:
        return next(card for card in self.criteria if card.criterion == criterion)


@dataclass(frozen=True)
class ReportCard:
    """Criteria against accepted lengths, of one tree at one temperature."""

    nodes: int
    temperature: float
    seeds: int
    questions: int
    tau: tuple[Estimate, ...]
    """AVG of every set, with percentile intervals over seeds and questions."""
    apart: tuple[Estimate, ...]
    """The same minus the mean of all sets, paired."""
    groups: tuple[GroupCard, ...]
    notes: tuple[str, ...]
    """What the intervals do not hold."""

    def __getitem__(self, group: str) -> GroupCard:
        return next(card for card in self.groups if card.name == group)

    @property
    def record(self) -> dict[str, Any]:
        """All of it for JSON, with the verdicts."""
        found = asdict(self) | {"reading": self.reading}
        for group, card in zip(found["groups"], self.groups, strict=True):
            for criterion, own in zip(group["criteria"], card.criteria, strict=True):
                criterion["verdict"] = own.verdict
        return found

    @property
    def reading(self) -> str:
        """Sentences on raw `S_1`, overall and within sizes, and on what is told apart from it."""
        return " ".join(_reading(card) for card in self.groups if card.name in (ALL, WITHIN))


def _reading(card: GroupCard) -> str:
    where = f"Over all {len(card.members)} sets" if card.name == ALL else "Among sets of one size"
    found = card[REFERENCE].spearman
    if found.value is None:
        return f"{where} the correlation of raw S_1 with τ is undefined: {found.missing}."
    text = f"{where} raw S_1 correlates with τ at ρ = {found.value:.2f}"
    bounds = {"other seeds and questions": found.over_measurements, "other sets": found.over_sets}
    if told := [f"{what}: {pair[0]:.2f} to {pair[1]:.2f}" for what, pair in bounds.items() if pair]:
        text += f" ({'; '.join(told)})"
    if card.ceiling is not None:
        text += f", where the true τ itself would reach about {card.ceiling:.2f}"
    for verdict in ("better", "worse"):
        names = [own.criterion for own in card.criteria if own.verdict == verdict and own.criterion != TRAINED]
        text += f". Predicting τ {verdict} than raw S_1: {', '.join(names) or 'none'}"
    return f"{text}."


def report_cards(validation: Validation, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[ReportCard, ...]:
    """The report card of each tree at each temperature.

    Raises:
        LayerwaveError: no question has a round with every draft, or a score is not finite.
    """
    scores = scores_of(validation)
    sizes = np.array([candidate.size for candidate in validation.candidates])
    return tuple(
        report_card(accepted, scores, sizes, resamples=resamples, seed=seed)
        for accepted in accepted_lengths(validation.evaluations)
    )


def scores_of(validation: Validation) -> dict[str, Float[np.ndarray, " M"]]:
    """Scores of the candidates by every criterion, by the parts of `S_1`, and by what the drafts' training measured."""
    sets = validation.candidates
    found = {name: np.array([candidate.scores[name] for candidate in sets]) for name in sets[0].scores}
    found |= {part: np.array([getattr(candidate, part) for candidate in sets]) for part in PARTS}
    if validation.held_out:
        found[TRAINED] = np.mean(validation.held_out, axis=0)
    return found


def report_card(
    accepted: Accepted,
    scores: Mapping[str, Float[np.ndarray, " M"]],
    sizes: Int[np.ndarray, " M"],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> ReportCard:
    """Correlation of every criterion with τ (the paper's AVG), and regret of its choice, overall and within each size.

    Args:
        accepted: what was measured for M sets.
        scores: by criterion, greater is better; `entropy` is among them.
        sizes: numbers of layers.
        resamples: of which all criteria share each.

    Raises:
        LayerwaveError: a score is not finite, or raw `S_1` is missing.
    """
    if REFERENCE not in scores:
        raise LayerwaveError(f"scores are by {', '.join(scores)}: add {REFERENCE}, which the others are compared with")
    for name, values in scores.items():
        if not np.isfinite(values).all():
            raise LayerwaveError(f"scores by {name} are {values.tolist()}, expected finite ones: leave it out")
    measured = average(accepted, as_measured(accepted))[0]
    drawn = average(accepted, resample(accepted, resamples, seed)) if varies(accepted) else None
    study = _Study(
        tuple(scores),
        np.stack([_levels(values) for values in scores.values()]),
        measured,
        drawn,
        resampled_sets(sizes, resamples, seed),
        halves(accepted, seed),
    )
    return ReportCard(
        accepted.nodes,
        accepted.temperature,
        accepted.seeds,
        accepted.questions,
        estimates(measured, drawn),
        estimates(from_mean(measured[None])[0], None if drawn is None else from_mean(drawn)),
        tuple(_group(study, name, strata) for name, strata in _groups(sizes).items()),
        tuple(_notes(accepted, len(scores))),
    )


@dataclass(frozen=True, eq=False)
class _Study:
    """What all groups share: K criteria, M sets, R resamples."""

    names: tuple[str, ...]
    scores: Float[np.ndarray, "K M"]
    measured: Float[np.ndarray, " M"]
    drawn: Float[np.ndarray, "R M"] | None
    others: Int[np.ndarray, "R M"]
    split: Halves | None


def _levels(values: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    """Scores as shares of the greatest, those that differ by rounding made equal."""
    return np.round(values / max(np.abs(values).max(), np.finfo(np.float64).tiny), -int(np.log10(EQUAL)))


def _groups(sizes: Int[np.ndarray, " M"]) -> dict[str, Strata]:
    by_size = {int(size): np.flatnonzero(sizes == size) for size in np.unique(sizes)}
    groups: dict[str, Strata] = {ALL: [np.arange(len(sizes))]}
    if len(by_size) > 1:
        groups[WITHIN] = list(by_size.values())
        groups |= {f"{size} layer{'s' * (size > 1)}": [members] for size, members in by_size.items()}
    return groups


def _group(study: _Study, name: str, strata: Strata) -> GroupCard:
    spearman, kendall = (
        correlate(coefficient, strata, study.scores, study.measured, study.drawn, study.others)
        for coefficient in ("spearman", "kendall")
    )
    members = np.sort(np.concatenate(strata))
    reference = study.names.index(REFERENCE)

    def cost(choice: np.ndarray) -> Regret | None:
        if len(strata) > 1:
            return None
        shares = np.bincount(choice, minlength=len(study.measured)) / len(choice)
        return regret(shares, members, study.measured, study.drawn, study.split)

    cards = []
    for k, criterion in enumerate(study.names):
        own = study.scores[k, members]
        choice = members[own == own.max()]
        beside = Correlation(None, missing="the reference") if k == reference else spearman.difference(k, reference)
        cards.append(CriterionCard(criterion, spearman[k], kendall[k], beside, tuple(choice.tolist()), cost(choice)))
    return GroupCard(
        name,
        tuple(members.tolist()),
        int(members[np.argmax(study.measured[members])]),
        None if compared_sets(strata) < LEAST or study.split is None else ceiling(strata, study.split),
        tuple(cards),
        cost(members),
    )


def _notes(accepted: Accepted, criteria: int) -> Iterator[str]:
    if accepted.seeds == 1:
        yield "one seed: the intervals do not hold what another training of the drafts would change"
    if accepted.left_out:
        yield f"{accepted.left_out} questions are left out, which some draft answered without a verification round"
    if accepted.questions == 1:
        yield "one question cannot be halved: no noise ceiling, and regret only as measured"
    if criteria > 2:
        yield f"{criteria - 1} criteria are compared with {REFERENCE}: of twenty such, one is told apart by chance"
