"""Accepted lengths of many drafts, measured with several seeds on the same questions, and how far chance moves them.

τ is defined as in `layerwave.decoding.tau`; over seeds it is the mean of the drafts' own: every draft weighs the same.
What was measured is crossed: every seed's draft of every set answers every question. Seeds and questions are resampled
separately, and a resample serves all sets, so that differences between sets are paired (Owen 2007, the pigeonhole
bootstrap).

Few seeds and few questions to a column make the plain bootstrap too narrow, by (n - 1) / n in variance. So n - 1 of n
are drawn (Rao and Wu 1988): seeds together, questions within their column, questions that are alone in theirs together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from layerwave.decoding import Evaluation
from layerwave.decoding.questions import COLUMN_OF, COLUMNS
from layerwave.decoding.tau import RESAMPLES, Estimate
from layerwave.errors import LayerwaveError


@dataclass(frozen=True, eq=False)
class Accepted:
    """What S seeds' drafts of M layer sets did on Q questions, with one tree at one temperature.

    Questions that some draft answered without a round are left out for all.
    """

    nodes: int
    temperature: float
    emitted: Int[np.ndarray, "S M Q"]
    """Tokens made in verification rounds."""
    rounds: Int[np.ndarray, "S M Q"]
    seconds: Float[np.ndarray, "S M Q"]
    plain_seconds: Float[np.ndarray, "S Q"]
    """Of plain decoding."""
    columns: tuple[str, ...]
    """Column of each question in the paper's Table 2."""
    left_out: int
    """Questions."""

    @property
    def seeds(self) -> int:
        return self.rounds.shape[0]

    @property
    def questions(self) -> int:
        return self.rounds.shape[2]

    @property
    def present(self) -> tuple[str, ...]:
        """Columns that have a question, in the table's order."""
        return tuple(name for name in COLUMNS if name in self.columns)

    def members(self, column: str) -> Int[np.ndarray, " q"]:
        """Places of a column's questions."""
        return np.flatnonzero(np.array(self.columns) == column)

    @property
    def strata(self) -> tuple[Int[np.ndarray, " q"], ...]:
        """Questions that are drawn from together: a column's, and those that are alone in theirs."""
        groups = [self.members(column) for column in self.present]
        alone = [group for group in groups if len(group) == 1]
        shared = [group for group in groups if len(group) > 1]
        return (*shared, np.concatenate(alone)) if alone else tuple(shared)


@dataclass(frozen=True, eq=False)
class Draws:
    """How much each seed and each question counts, in each of R resamples. Scales of either do not matter."""

    seeds: Float[np.ndarray, "R S"]
    """Each row sums to 1."""
    questions: Float[np.ndarray, "R Q"]


def accepted_lengths(evaluations: Sequence[Evaluation]) -> tuple[Accepted, ...]:
    """What was measured with each tree at each temperature, from evaluations of one a seed, of the same drafts.

    Raises:
        LayerwaveError: no question has a round with every draft.
    """
    settings = evaluations[0].settings
    return tuple(
        _accepted(evaluations, nodes, temperature) for nodes in settings.nodes for temperature in settings.temperatures
    )


def _accepted(evaluations: Sequence[Evaluation], nodes: int, temperature: float) -> Accepted:
    chosen = [
        [
            run
            for run in evaluation.runs
            if run.draft is not None and (run.nodes, run.temperature) == (nodes, temperature)
        ]
        for evaluation in evaluations
    ]  # in each evaluation in the order of its drafts
    plain = [evaluation.plain(temperature) for evaluation in evaluations]

    def counted(name: str, kind: type) -> np.ndarray:
        return np.array([[[getattr(row, name) for row in run.rows] for run in runs] for runs in chosen], kind)

    rounds = counted("rounds", np.int64)
    used = (rounds > 0).all(axis=(0, 1))
    if not used.any():
        raise LayerwaveError(
            f"no question has a verification round with every draft ({nodes} nodes, temperature {temperature:g}): ask "
            "questions with longer answers, or allow more tokens"
        )
    return Accepted(
        nodes,
        temperature,
        emitted=counted("emitted", np.int64)[:, :, used],
        rounds=rounds[:, :, used],
        seconds=counted("seconds", np.float64)[:, :, used],
        plain_seconds=np.array([[row.seconds for row in run.rows] for run in plain])[:, used],
        columns=tuple(COLUMN_OF[name] for name, kept in zip(evaluations[0].categories, used, strict=True) if kept),
        left_out=int((~used).sum()),
    )


def as_measured(accepted: Accepted) -> Draws:
    """Every seed and question once."""
    return Draws(np.full((1, accepted.seeds), 1 / accepted.seeds), np.ones((1, accepted.questions)))


def resample(accepted: Accepted, resamples: int = RESAMPLES, seed: int = 0) -> Draws:
    """Resamples of seeds and of questions, see the head of this module. A single seed stays what it is."""
    rng = np.random.default_rng(seed)
    questions = np.ones((resamples, accepted.questions))
    for stratum in accepted.strata:
        questions[:, stratum] = _drawn(len(stratum), resamples, rng) * len(stratum)
    return Draws(_drawn(accepted.seeds, resamples, rng), questions)


def _drawn(count: int, resamples: int, rng: np.random.Generator) -> Float[np.ndarray, "R {count}"]:
    """Shares of `count` things in draws of one less, with replacement; a thing that is alone is always there."""
    less = max(1, count - 1)
    return rng.multinomial(less, np.full(count, 1 / count), size=resamples) / less


def tau(accepted: Accepted, draws: Draws, column: str | None = None) -> Float[np.ndarray, "R M"]:
    """τ of every set in every resample: tokens over rounds of all questions, or of a column's; mean over seeds.

    0 where no such question is in the resample.
    """
    return _ratio(accepted.emitted, accepted.rounds, draws, _places(accepted, column))


def average(accepted: Accepted, draws: Draws) -> Float[np.ndarray, "R M"]:
    """The paper's AVG of every set in every resample: the columns' τ weighted by their numbers of questions."""
    total = 0.0
    for column in accepted.present:
        share = draws.questions[:, accepted.members(column)].sum(axis=1, keepdims=True)
        total = total + share * tau(accepted, draws, column)
    return total / draws.questions.sum(axis=1, keepdims=True)


def from_mean(values: Float[np.ndarray, "R M"]) -> Float[np.ndarray, "R M"]:
    """What each set has more than all sets in the mean: what makes a question easy for all is not in it."""
    return values - values.mean(axis=1, keepdims=True)


def speedup(accepted: Accepted, draws: Draws) -> Float[np.ndarray, "R M"]:
    """Seconds of plain decoding over seconds with the draft, of every set in every resample; mean over seeds."""
    plain = np.broadcast_to(accepted.plain_seconds[:, None], accepted.seconds.shape)
    return _ratio(plain, accepted.seconds, draws, _places(accepted, None))


def _places(accepted: Accepted, column: str | None) -> Int[np.ndarray, " q"]:
    return np.arange(accepted.questions) if column is None else accepted.members(column)


def _ratio(
    above: Int[np.ndarray, "S M Q"] | Float[np.ndarray, "S M Q"],
    below: Int[np.ndarray, "S M Q"] | Float[np.ndarray, "S M Q"],
    draws: Draws,
    places: Int[np.ndarray, " q"],
) -> Float[np.ndarray, "R M"]:
    weights = draws.questions[:, places]
    over, under = (np.tensordot(weights, counts[:, :, places], axes=(1, 2)) for counts in (above, below))
    return np.einsum("rs,rsm->rm", draws.seeds, over / np.where(under > 0, under, 1))


@dataclass(frozen=True)
class SetLengths:
    """Statistics of one layer set's drafts, with 95 % percentile intervals over seeds and questions.

    Of one seed the intervals do not count what another training would change.
    """

    columns: dict[str, Estimate]
    """τ by column of the paper's Table 2; of a single question and seed there is no interval."""
    overall: Estimate
    """τ of all rounds together (micro)."""
    average: Estimate
    """The paper's AVG."""
    apart: Estimate
    """AVG minus the mean AVG of all sets: paired, so its interval is the one that tells sets apart."""
    speedup: Estimate


def set_lengths(accepted: Accepted, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[SetLengths, ...]:
    """Statistics of every set, in their order."""
    whole, draws = as_measured(accepted), resample(accepted, resamples, seed)
    columns = {name: _column(accepted, name, draws) for name in accepted.present}

    def of(statistic) -> list[np.ndarray]:
        """As measured, and resampled where there is anything to resample."""
        return [statistic(accepted, given) for given in ((whole, draws) if varies(accepted) else (whole,))]

    averages = of(average)
    others = (
        estimates(measured[0], drawn[0] if drawn else None)
        for measured, *drawn in (of(tau), averages, map(from_mean, averages), of(speedup))
    )
    return tuple(
        SetLengths({name: column[m] for name, column in columns.items()}, *found)
        for m, found in enumerate(zip(*others, strict=True))
    )


def _column(accepted: Accepted, name: str, draws: Draws) -> tuple[Estimate, ...]:
    measured = tau(accepted, as_measured(accepted), name)[0]
    if len(accepted.members(name)) > 1:
        return estimates(measured, tau(accepted, draws, name))
    if accepted.seeds == 1:
        return estimates(measured, None)
    return estimates(measured, tau(accepted, Draws(draws.seeds, np.ones_like(draws.questions)), name))


def varies(accepted: Accepted) -> bool:
    """Whether there is anything to resample."""
    return accepted.seeds > 1 or accepted.questions > 1


def estimates(measured: Float[np.ndarray, " M"], drawn: Float[np.ndarray, "R M"] | None) -> tuple[Estimate, ...]:
    """Values with 95 % percentile intervals; without resamples there are none."""
    if drawn is None:
        return tuple(Estimate(value, None, None) for value in measured.tolist())
    bounds = np.quantile(drawn, (0.025, 0.975), axis=0).T.tolist()
    return tuple(Estimate(value, low, high) for value, (low, high) in zip(measured.tolist(), bounds, strict=True))
