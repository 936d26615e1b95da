"""Accepted lengths and speed-ups of an evaluation, with bootstrap intervals over questions.

τ is the number of tokens that a verification round makes: tokens emitted in rounds over rounds, so that 1 means that
no drafted token was ever kept. The bonus token of a round counts, the token of the prompt's pass does not. An answer's
last round may be cut by an end token or limit, which lowers τ a little.

Intervals are 95 % percentile intervals; questions are resampled, for a column of the table within it. Runs share the
resamples.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float64

from layerwave.decoding.evaluation import Evaluation, Row, Run
from layerwave.decoding.questions import COLUMN_OF, COLUMNS

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A statistic and its interval; of a single question there is none, and its bounds are None."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Lengths:
    """Accepted lengths over some questions of a run, those without a single round left out."""

    questions: int
    rounds: int
    emitted: int
    drafted: int
    kept: int
    """Drafted tokens that were kept."""
    tau: Estimate
    """Of all rounds together (micro)."""
    mean: Estimate
    """Of the questions' own τ."""
    acceptance: tuple[float, ...]
    """Probability that a drafted token at depth 1, 2, … was kept where the one above it was."""


@dataclass(frozen=True)
class Summary:
    """Statistics of one draft with one tree at one temperature."""

    draft: str
    nodes: int
    temperature: float
    columns: dict[str, Lengths]
    """By columns of the paper's Table 2; those without a round are missing."""
    overall: Lengths
    average: Estimate
    """The paper's AVG: the columns' τ weighted by their numbers of questions."""
    speedup: Estimate
    """Seconds of plain decoding over seconds with the draft, for the same prompts in the same engine."""
    tokens_per_second: float
    plain_tokens_per_second: float
    answers: int
    differing: tuple[tuple[int | str, int, int], ...]
    """(id, turn, place), from 0, of each answer that is not plain decoding's, where the two part."""
    stops: dict[str, int]
    empty: int
    """Answers of nothing but an end token."""
    ended: dict[str, int]
    """Questions of which turns were not asked, by reason."""


def summarize(evaluation: Evaluation) -> tuple[Summary, ...]:
    """Statistics of every run with a draft, in the order of the runs."""
    columns = [COLUMN_OF[category] for category in evaluation.categories]
    return tuple(
        _summary(run, evaluation.plain(run.temperature), columns, evaluation.ids)
        for run in evaluation.runs
        if run.draft is not None
    )


def _summary(run: Run, plain: Run, columns: Sequence[str], ids: Sequence[int | str]) -> Summary:
    used = [i for i, row in enumerate(run.rows) if row.rounds]
    rows, plain_rows = ([one.rows[i] for i in used] for one in (run, plain))
    members = {name: np.array([columns[i] == name for i in used]) for name in COLUMNS}
    lengths = {name: _lengths([rows[i] for i in np.flatnonzero(of)]) for name, of in members.items() if of.any()}

    weights = _resamples(len(used))
    sizes = {name: weights[:, members[name]].sum(axis=1) for name in lengths}
    taus = {
        name: _taus([rows[i] for i in np.flatnonzero(members[name])], weights[:, members[name]]) for name in lengths
    }
    average = sum(group.questions * group.tau.value for group in lengths.values()) / len(used)
    averages = np.sum([sizes[name] * taus[name] for name in lengths], axis=0) / len(used)
    seconds, plain_seconds = (np.array([row.seconds for row in these]) for these in (rows, plain_rows))
    speedup = float(plain_seconds.sum() / seconds.sum())
    speedups = (weights @ plain_seconds) / (weights @ seconds)
    return Summary(
        draft=str(run.draft),
        nodes=int(run.nodes or 0),
        temperature=run.temperature,
        columns=lengths,
        overall=_lengths(rows),
        average=_estimate(average, averages, len(used)),
        speedup=_estimate(speedup, speedups, len(used)),
        tokens_per_second=sum(row.tokens for row in rows) / seconds.sum(),
        plain_tokens_per_second=sum(row.tokens for row in plain_rows) / plain_seconds.sum(),
        answers=sum(sum(row.stops.values()) for row in run.rows),
        differing=tuple((id, *where) for id, row in zip(ids, run.rows, strict=True) for where in row.differing),
        stops=dict(sum((Counter(row.stops) for row in run.rows), Counter())),
        empty=sum(row.empty for row in run.rows),
        ended=dict(Counter(row.ended for row in run.rows if row.ended)),
    )


def _resamples(questions: int) -> Float64[np.ndarray, "R Q"]:
    """How often each question is drawn in each resample."""
    even = np.full(questions, 1 / questions)
    return np.random.default_rng(0).multinomial(questions, even, size=RESAMPLES).astype(np.float64)


def _taus(rows: Sequence[Row], weights: Float64[np.ndarray, "R Q"]) -> Float64[np.ndarray, " R"]:
    """τ of each resample; 0 where none of these questions is in it."""
    emitted, rounds = (np.array([getattr(row, name) for row in rows], np.float64) for name in ("emitted", "rounds"))
    return (weights @ emitted) / np.maximum(weights @ rounds, 1)


def _lengths(rows: Sequence[Row]) -> Lengths:
    weights = _resamples(len(rows))
    rounds, emitted = sum(row.rounds for row in rows), sum(row.emitted for row in rows)
    own = np.array([row.emitted / row.rounds for row in rows])
    return Lengths(
        questions=len(rows),
        rounds=rounds,
        emitted=emitted,
        drafted=sum(row.drafted for row in rows),
        kept=sum(row.kept for row in rows),
        tau=_estimate(emitted / rounds, _taus(rows, weights), len(rows)),
        mean=_estimate(float(own.mean()), (weights @ own) / len(rows), len(rows)),
        acceptance=_acceptance(np.sum([row.accepted for row in rows], axis=0).tolist()),
    )


def _acceptance(accepted: Sequence[int]) -> tuple[float, ...]:
    """Conditional probabilities by depth, as far as a round has come, from numbers of rounds by tokens kept."""
    reached = np.cumsum(accepted[::-1])[::-1].tolist()
    return tuple(deeper / here for here, deeper in pairwise(reached) if here)


def _estimate(value: float, draws: Float64[np.ndarray, " R"], questions: int) -> Estimate:
    if questions < 2:
        return Estimate(value, None, None)
    low, high = np.quantile(draws, (0.025, 0.975)).tolist()
    return Estimate(value, low, high)
