"""τ over seeds and questions: the definitions of `layerwave evaluate`, a literal loop, and what resampling holds."""

from dataclasses import replace

import numpy as np
import pytest

from layerwave.decoding.tau import summarize
from layerwave.errors import LayerwaveError
from layerwave.validation.accepted import (
    Accepted,
    Draws,
    accepted_lengths,
    as_measured,
    average,
    resample,
    set_lengths,
    speedup,
    tau,
)
from tests.validations import SETS, planted_validation


@pytest.fixture(scope="module")
def validation():
    return planted_validation(seeds=2, temperatures=(0.0, 1.0))


@pytest.fixture(scope="module")
def measured(validation):
    return accepted_lengths(validation.evaluations)


def some(seeds=2, sets=3, columns=("QA", "QA", "QA", "RAG", "RAG", "STEM", "SUMM"), key=0, noise=0.0) -> Accepted:
    rng = np.random.default_rng(key)
    shape = (seeds, sets, len(columns))
    rounds = rng.integers(5, 50, size=shape)
    own = 2 + noise * rng.normal(size=(seeds, sets, 1))
    return Accepted(
        30,
        0.0,
        emitted=np.round(rounds * (own + 0.5 * rng.random(shape))).astype(np.int64),
        rounds=rounds,
        seconds=rng.random(shape),
        plain_seconds=rng.random((seeds, len(columns))),
        columns=columns,
        left_out=0,
    )


def test_of_one_seed_it_is_what_an_evaluation_says(validation):
    (evaluation, _) = validation.evaluations
    found = {(a.nodes, a.temperature): set_lengths(a) for a in accepted_lengths([evaluation])}
    assert len(found) == 4
    for summary in summarize(evaluation):
        own = found[summary.nodes, summary.temperature][[d.name for d in evaluation.drafts].index(summary.draft)]
        assert own.overall.value == pytest.approx(summary.overall.tau.value)
        assert own.average.value == pytest.approx(summary.average.value)
        assert own.speedup.value == pytest.approx(summary.speedup.value)
        assert {n: e.value for n, e in own.columns.items()} == pytest.approx(
            {n: group.tau.value for n, group in summary.columns.items()}
        )


def test_a_literal_loop_over_resamples():
    a = some()
    draws = resample(a, resamples=7, seed=1)
    for r in range(7):
        v, w = draws.seeds[r], draws.questions[r]
        for m in range(3):
            expected, sped = 0.0, 0.0
            for s in range(2):
                own = 0.0
                for column in set(a.columns):
                    q = [i for i, name in enumerate(a.columns) if name == column]
                    rounds = sum(w[i] * a.rounds[s, m, i] for i in q)
                    size = sum(w[i] for i in q)
                    if size:
                        own += size / w.sum() * sum(w[i] * a.emitted[s, m, i] for i in q) / rounds
                expected += v[s] * own
                sped += v[s] * (w @ a.plain_seconds[s]) / (w @ a.seconds[s, m])
            assert average(a, draws)[r, m] == pytest.approx(expected)
            assert speedup(a, draws)[r, m] == pytest.approx(sped)


def test_seeds_weigh_alike_however_many_rounds_they_took():
    a = some(seeds=2)
    longer = replace(a, emitted=a.emitted * [[[10]], [[1]]], rounds=a.rounds * [[[10]], [[1]]])
    np.testing.assert_allclose(tau(longer, as_measured(a)), tau(a, as_measured(a)))


def test_resamples_keep_columns_and_the_variance_of_few():
    """Of n things n - 1 are drawn: their mean then varies as that of n does, s² / n with the unbiased s²."""
    a = some(seeds=3)
    draws = resample(a, resamples=40_000)
    np.testing.assert_allclose(draws.seeds.sum(axis=1), 1)
    for column, size in (("QA", 3), ("RAG", 2)):
        np.testing.assert_allclose(draws.questions[:, a.members(column)].sum(axis=1), size)
    alone = draws.questions[:, [5, 6]]  # one question each in their columns: drawn together
    np.testing.assert_allclose(alone.sum(axis=1), 2)
    assert set(np.unique(alone)) == {0, 2}
    values = np.array([1.0, 4.0, 10.0])
    assert (draws.seeds @ values).var() == pytest.approx(values.var(ddof=1) / 3, rel=0.05)
    drawn = draws.questions[:, :3] @ values / 3
    assert drawn.var() == pytest.approx(values.var(ddof=1) / 3, rel=0.05)


def test_a_resample_serves_all_sets():
    """The same draft twice differs by nothing, whatever is drawn."""
    a = some(sets=1)
    twice = replace(a, **{name: np.repeat(getattr(a, name), 2, axis=1) for name in ("emitted", "rounds", "seconds")})
    for drawn in (average(twice, resample(twice, 50)), speedup(twice, resample(twice, 50))):
        np.testing.assert_array_equal(drawn[:, 0], drawn[:, 1])
        assert np.ptp(drawn[:, 0]) > 0


def test_what_questions_do_to_all_sets_does_not_widen_the_difference_from_their_mean():
    """Drafts that are the same but for a constant: τ is uncertain, and how far they are from each other is not."""
    a = some(sets=1, seeds=1)
    emitted = np.concatenate([a.emitted, a.emitted + a.rounds], axis=1)
    pair = replace(a, emitted=emitted, **{n: np.repeat(getattr(a, n), 2, axis=1) for n in ("rounds", "seconds")})
    less, more = set_lengths(pair)
    assert less.average.high - less.average.low > 0.05
    assert more.average.value - less.average.value == pytest.approx(1)
    for own, expected in ((less, -0.5), (more, 0.5)):
        assert (own.apart.low, own.apart.value, own.apart.high) == pytest.approx((expected,) * 3)


def test_intervals_are_none_where_nothing_varies():
    alone = set_lengths(some(seeds=1, columns=("QA",)))[0]
    assert (alone.average.low, alone.overall.high, alone.speedup.low, alone.columns["QA"].low) == (None,) * 4
    one_seed = set_lengths(some(seeds=1))[0]
    assert one_seed.columns["STEM"].low is None
    assert one_seed.columns["QA"].low < one_seed.columns["QA"].value < one_seed.columns["QA"].high
    assert one_seed.average.low is not None
    seeds = set_lengths(some(seeds=3, noise=0.2))[0]
    assert seeds.columns["STEM"].low < seeds.columns["STEM"].high


def test_the_noise_of_training_widens_the_interval():
    calm, noisy = (set_lengths(some(seeds=3, noise=noise)) for noise in (0.0, 0.5))
    for still, moved in zip(calm, noisy, strict=True):
        assert moved.average.high - moved.average.low > 2 * (still.average.high - still.average.low)


def test_questions_without_a_round_are_left_out_for_all(validation):
    first, second = validation.evaluations
    runs = list(second.runs)
    place = next(i for i, run in enumerate(runs) if run.draft is not None)
    rows = list(runs[place].rows)
    rows[4] = replace(rows[4], emitted=0, accepted=(0,) * 8)
    runs[place] = replace(runs[place], rows=tuple(rows))
    hurt, other = accepted_lengths([first, replace(second, runs=tuple(runs))])[:2]
    assert (hurt.left_out, other.left_out) == (1, 0)
    assert hurt.questions == other.questions - 1
    assert hurt.rounds.shape == (2, len(SETS), hurt.questions)
    assert all(np.isfinite(average(hurt, as_measured(hurt)))[0])
    empty = [replace(run, rows=tuple(replace(row, accepted=(0,)) for row in run.rows)) for run in first.runs]
    with pytest.raises(LayerwaveError, match="no question has a verification round"):
        accepted_lengths([replace(first, runs=tuple(empty))])


def test_a_half_without_a_column_weighs_the_others():
    a = some(seeds=1)
    only = Draws(np.ones((1, 1)), np.array([[1.0, 1, 1, 0, 0, 0, 0]]))
    np.testing.assert_allclose(average(a, only), tau(a, as_measured(a), "QA"))
