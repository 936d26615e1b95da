"""Rows against decoding turn by turn; interrupted runs against uninterrupted ones; statistics against known values."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.commands.evaluate import Evaluate, print_evaluation
from layerwave.decoding import Continuation, GenerationSettings, TreeSettings, decode
from layerwave.decoding.evaluate import _Tally, evaluate
from layerwave.decoding.evaluation import EvaluatedDraft, Evaluation, EvaluationSettings, Row, Run
from layerwave.decoding.tau import summarize
from layerwave.decoding.timing import timed
from layerwave.drafts import DraftVocabulary, initial_draft, save_draft
from layerwave.errors import LayerwaveError
from layerwave.report.figures.acceptance_lengths import acceptance_lengths
from layerwave.targets import load_target
from tests.decoding.test_distill import make_target

pytestmark = pytest.mark.usefixtures("quick_compilation")

SETTINGS = EvaluationSettings(nodes=(4, 6), temperatures=(0.0, 1.2), max_new_tokens=9, batch=2, depth=3, top_k=2)
QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["ab?", "c a?"]},
    {"question_id": 2, "category": "math", "turns": ["cc a?", "bb?"]},
    {"question_id": 3, "category": "qa", "turns": ["a b c?"]},
    {"question_id": 4, "category": "reasoning", "turns": ["abc?", "d"]},
    {"question_id": "long", "category": "rag", "turns": ["a" * 30, "b" * 60]},
]


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def drafts(target):
    def draft(layers, seed):
        return initial_draft(target, layers, DraftVocabulary(np.arange(11), 11), jax.random.key(seed))

    return {"first": draft((0,), 0), "last": draft((1,), 1)}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation") / "evaluation.json"


@pytest.fixture(scope="module")
def evaluation(target, drafts, out):
    return evaluate(target, drafts, out, SETTINGS, questions=QUESTIONS)


def counted(evaluation):
    """Everything but the seconds."""
    return [replace(run, rows=tuple(replace(row, seconds=0.0) for row in run.rows)) for run in evaluation.runs]


def test_greedy_rows_are_those_of_turns_by_themselves(target, drafts, evaluation):
    tokenizer = target.tokenizer
    settings = GenerationSettings(9, end_token=tokenizer.eos_token_id)
    runs = [run for run in evaluation.runs if run.temperature == 0]
    assert [(run.draft, run.nodes) for run in runs] == [
        (None, None), ("first", 4), ("first", 6), ("last", 4), ("last", 6)
    ]  # fmt: skip
    for run in runs:
        tree = None if run.nodes is None else TreeSettings(run.nodes, 3, 2)
        for question, row in zip(QUESTIONS[:3], run.rows, strict=False):
            messages, made = [], []
            for turn in question["turns"]:
                messages.append({"role": "user", "content": turn})
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                ids = tokenizer(text, add_special_tokens=False).input_ids
                # As many rows as the run has: sums, and so near ties, are the same.
                made += decode(target.decoder, [ids] * 2, settings, jax.random.key(5), drafts.get(run.draft), tree)[:1]
                answer = tokenizer.decode(made[-1].tokens, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
            accepted = sum(answer.accepted for answer in made)
            emitted, drafted = sum(answer.emitted for answer in made), sum(answer.drafted for answer in made)
            assert (row.accepted, row.emitted, row.drafted) == (tuple(accepted.tolist()), emitted, drafted)
            assert sum(row.stops.values()) == len(question["turns"])


def test_every_answer_is_that_of_plain_decoding(evaluation):
    for temperature in SETTINGS.temperatures:
        plain, *others = (run for run in evaluation.runs if run.temperature == temperature)
        assert plain == evaluation.plain(temperature)
        assert len(others) == 4
        for run in others:
            for row, alone in zip(run.rows, plain.rows, strict=True):
                assert row.differing == ()
                assert (row.tokens, row.emitted, row.stops) == (alone.tokens, alone.emitted, alone.stops)
        assert all(row.rounds == row.emitted and row.drafted == 0 for row in plain.rows)
    assert sum(row.kept for run in evaluation.runs for row in run.rows) > 0
    sampled, greedy = evaluation.plain(1.2), evaluation.plain(0.0)
    assert [row.tokens for row in sampled.rows] != [row.tokens for row in greedy.rows]


def test_turns_that_cannot_be_asked_are_counted(evaluation):
    for run in evaluation.runs:
        assert [row.ended for row in run.rows] == ["", "", "", "", "rows ended for want of positions"]
        assert [sum(row.stops.values()) for row in run.rows] == [2, 2, 1, 2, 1]
    assert summarize(evaluation)[0].ended == {"rows ended for want of positions": 1}


def test_a_template_may_refuse(target, drafts, tmp_path):
    rows = [{"question_id": 1, "category": "qa", "turns": ["d"]}, *QUESTIONS[2:3]]
    settings = replace(SETTINGS, nodes=(4,), temperatures=(0.0,))
    found = evaluate(target, {"last": drafts["last"]}, tmp_path / "out.json", settings, questions=rows)
    assert [row.ended for row in found.runs[1].rows] == ["rows ended by the chat template", ""]
    (summary,) = summarize(found)
    assert summary.overall.questions == 1
    with pytest.raises(LayerwaveError, match=r"not one round of decoding at temperature 0 .*1 rows ended by the chat"):
        evaluate(target, {"last": drafts["last"]}, tmp_path / "none.json", settings, questions=rows[:1])


def test_the_file_gives_everything_back(evaluation, out):
    assert Evaluation.load(out) == evaluation
    assert not out.with_name("evaluation.json.partial").exists()


class Stop(Exception):
    pass


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_run_goes_on(target, drafts, evaluation, tmp_path, torn):
    calls = []

    def interrupt(*progress):
        calls.append(progress)
        if len(calls) == 4:
            raise Stop

    out, journal = tmp_path / "out.json", tmp_path / "out.json.partial"
    with pytest.raises(Stop):
        evaluate(target, drafts, out, SETTINGS, questions=QUESTIONS, progress=interrupt)
    assert not out.exists()
    done = len(journal.read_text().splitlines()) - 1
    if torn:
        journal.write_bytes(journal.read_bytes()[:-7])
        done -= 1
    later = []
    found = evaluate(target, drafts, out, SETTINGS, questions=QUESTIONS, progress=lambda *p: later.append(p))
    assert counted(found) == counted(evaluation)
    assert len(later) == 6 - done
    assert later[-1][:2] == (10, 10)
    assert not journal.exists()
    again = []
    assert evaluate(target, drafts, out, SETTINGS, questions=QUESTIONS, progress=lambda *p: again.append(p)) == found
    assert again == []


def test_another_run_is_refused(target, drafts, evaluation, out):
    swapped = {"first": drafts["last"], "last": drafts["first"]}
    for changes, message in (
        ({"settings": replace(SETTINGS, seed=1)}, "of a run with other seed"),
        ({"questions": QUESTIONS[:4]}, "other questions"),
        ({"drafts": swapped}, "other drafts"),
    ):
        given = {"drafts": drafts, "settings": SETTINGS, "questions": QUESTIONS, **changes}
        with pytest.raises(LayerwaveError, match=message):
            evaluate(target, given["drafts"], out, given["settings"], questions=given["questions"])


def test_faults(target, drafts, tmp_path):
    out = tmp_path / "out.json"
    with pytest.raises(LayerwaveError, match="no draft to evaluate"):
        evaluate(target, {}, out, SETTINGS, questions=QUESTIONS)
    with pytest.raises(LayerwaveError, match="the draft was made for the target"):
        evaluate(replace(target, fingerprint="fedcba"), drafts, out, SETTINGS, questions=QUESTIONS)
    out.write_text("mine")
    with pytest.raises(LayerwaveError, match=r"out\.json cannot be read"):
        evaluate(target, drafts, out, SETTINGS, questions=QUESTIONS)
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": ()}, "nodes are"),
        ({"nodes": (30, 30)}, "nodes are"),
        ({"nodes": (1,)}, "nodes of the tree is 1"),
        ({"temperatures": ()}, "temperatures are"),
        ({"temperatures": (0.0, -1.0)}, "temperature is -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"samples_per_category": 0}, "samples_per_category is 0"),
        ({"top_k": 1}, "a tree of 30 nodes"),
    ],
)
def test_setting_faults(changes, message):
    with pytest.raises(LayerwaveError, match=message):
        EvaluationSettings(**changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda _: "[]", "is not an evaluation"),
        (lambda text: text.replace("layerwave.evaluation", "layerwave.run"), "is not an evaluation"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has schema version 2, this layerwave reads 1"),
        (lambda text: text.replace('"emitted"', '"made"'), "is damaged"),
        (lambda text: json.dumps({**json.loads(text), "runs": []}), "lacks runs"),
        (lambda text: json.dumps({**json.loads(text), "ids": [1]}), "lacks runs, or runs lack questions"),
    ],
)
def test_damaged_files(evaluation, out, tmp_path, change, message):
    path = tmp_path / "damaged.json"
    path.write_text(change(out.read_text()))
    with pytest.raises(LayerwaveError, match=message):
        Evaluation.load(path)


def test_the_first_difference_is_noted():
    def answer(*tokens):
        return Continuation(tokens, "max_new_tokens", np.array([len(tokens) - 1]), 0)

    tally = _Tally()
    tally.add(answer(1, 2, 3), answer(1, 2, 3), 1.0)
    tally.add(answer(1, 2, 3), answer(1, 4, 3), 2.0)
    tally.add(answer(1, 2), answer(1, 2, 3), 0.5)
    row = tally.row(1, "")
    assert row.differing == ((1, 1), (2, 2))
    assert row.seconds == 3.5


def row(accepted, seconds=1.0, cut=0, **changes):
    """A question of one answer, whose rounds kept 0, 1, … tokens so often; `cut` tokens of the last are not emitted."""
    emitted = sum(count * (depth + 1) for depth, count in enumerate(accepted)) - cut
    fields = {"stops": {"end_token": 1}, "empty": 0, "differing": (), "ended": ""}
    given = fields | changes
    return Row(emitted + 1, emitted, tuple(accepted), 5 * sum(accepted), seconds, **given)


def evaluation_of(categories, rows, plain=None):
    plain = plain or [row([made.emitted], 2.0) for made in rows]
    return Evaluation(
        target="hand-made",
        target_fingerprint="0",
        dtype="float32",
        device="none",
        drafts=(EvaluatedDraft("d", (1,), "1"),),
        settings=EvaluationSettings(nodes=(6,), temperatures=(0.0,)),
        questions="2",
        ids=tuple(range(len(rows))),
        categories=tuple(categories),
        runs=(Run(None, None, 0.0, tuple(plain)), Run("d", 6, 0.0, tuple(rows))),
    )


def test_statistics_by_hand():
    rows = [
        row([2, 2, 0]),  # 6 tokens in 4 rounds
        row([0, 1, 1], seconds=0.5, cut=1),  # 4 in 2
        row([0, 0, 3], differing=((0, 4),)),  # 9 in 3
        row([0, 0, 0], empty=1),
    ]
    (found,) = summarize(evaluation_of(["qa", "math", "math_reasoning", "rag"], rows))
    assert (found.overall.rounds, found.overall.emitted, found.overall.kept, found.overall.drafted) == (9, 19, 11, 45)
    assert found.overall.questions == 3
    assert found.overall.tau.value == pytest.approx(19 / 9)
    assert found.overall.mean.value == pytest.approx((6 / 4 + 4 / 2 + 9 / 3) / 3)
    assert found.overall.acceptance == pytest.approx((7 / 9, 4 / 7))
    assert list(found.columns) == ["QA", "M/R"]
    assert found.columns["QA"].tau.value == 1.5
    assert (found.columns["QA"].tau.low, found.columns["QA"].tau.high) == (None, None)
    assert found.columns["QA"].acceptance == (0.5, 0.0)
    assert found.columns["M/R"].tau.value == pytest.approx(13 / 5)
    assert found.columns["M/R"].mean.value == pytest.approx(2.5)
    assert found.average.value == pytest.approx((1 * 1.5 + 2 * 13 / 5) / 3)
    assert found.speedup.value == pytest.approx(6 / 2.5)
    assert (found.answers, found.empty, found.stops, found.differing) == (4, 1, {"end_token": 4}, ((2, 0, 4),))
    # A resample of M/R holds one of its questions twice, or both: τ is 2, 13/5 or 3.
    assert (found.columns["M/R"].tau.low, found.columns["M/R"].tau.high) == (2, 3)


def test_nothing_accepted_is_a_tau_of_one():
    (found,) = summarize(evaluation_of(["qa", "stem"], [row([7, 0]), row([3, 0])]))
    assert found.overall.tau == found.average == found.overall.mean
    assert (found.average.value, found.average.low, found.average.high) == (1, 1, 1)
    assert found.overall.acceptance == (0,)


def test_intervals_are_those_of_large_samples():
    """Equal numbers of rounds: τ is a mean over questions, whose error is that of a mean."""
    rng = np.random.default_rng(0)
    kept = rng.integers(0, 11, 400)
    rows = [row([10 - k, k], seconds=1 / (1 + k)) for k in kept.tolist()]
    (found,) = summarize(evaluation_of(["qa", "rag"] * 200, rows))
    half = 1.96 * (kept / 10).std() / np.sqrt(400)
    for estimate in (found.overall.tau, found.overall.mean, found.average):
        assert estimate.value == pytest.approx(1 + kept.mean() / 10)
        assert estimate.high - estimate.value == pytest.approx(half, rel=0.1)
        assert estimate.value - estimate.low == pytest.approx(half, rel=0.1)
    assert found.columns["QA"].tau.high - found.columns["QA"].tau.low == pytest.approx(2 * half * np.sqrt(2), rel=0.15)


def test_compilation_is_not_timed():
    calls = []

    @jax.jit
    def square(x):
        return x * x

    def work():
        calls.append(1)
        return square(jnp.ones(17))

    for expected in (2, 3):
        result, seconds = timed(work)
        assert len(calls) == expected
        assert seconds > 0
    assert result.shape == (17,)


def test_the_figure_shows_every_run(evaluation):
    figure = acceptance_lengths(evaluation)
    assert len(figure.axes) == 2 * 4
    lengths, depths = figure.axes[-2:]
    assert [text.get_text() for text in lengths.get_xticklabels()][-2:] == ["M/R", "AVG"]
    assert lengths.get_title() == "6 nodes, temperature 1.2"
    last = [found for found in summarize(evaluation) if (found.nodes, found.temperature) == (6, 1.2)]
    assert len(last) == 2
    for line, summary in zip(depths.lines, last, strict=True):
        assert tuple(line.get_ydata()) == summary.overall.acceptance


def test_the_table_has_the_papers_columns(evaluation, capsys):
    print_evaluation(evaluation, summarize(evaluation))
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if "CODING" in line)
    assert header.split()[-12:] == "CODING EXTR HUMAN QA RAG ROLE STEM SUMM TRANSL WRITING M/R AVG".split()
    assert "questions cut short: rows ended for want of positions" in text
    assert "64 of 64 answers are plain decoding's" in text


def test_the_command_on_the_bundled_target(tmp_path, capsys):
    mini = load_target("mini")
    vocabulary = DraftVocabulary(np.arange(64), mini.config.vocab_size)
    save_draft(initial_draft(mini, (3, 9), vocabulary, jax.random.key(0)), tmp_path / "3-9")
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out.json"
    questions.write_text(json.dumps({"question_id": 1, "category": "qa", "turns": ["Who?"]}))
    options = {"nodes": "3", "temperature": "0", "max_new_tokens": 4, "depth": 2, "top_k": 2, "questions": questions}
    Evaluate("mini", (tmp_path / "3-9",), out, **options, figure=tmp_path / "tau.png", json=True).run()
    printed = json.loads(capsys.readouterr().out)
    assert (printed["summaries"][0]["draft"], printed["summaries"][0]["nodes"]) == ("3-9", 3)
    assert printed["drafts"][0]["layers"] == [3, 9]
    assert (tmp_path / "tau.png").stat().st_size > 0
    for changes, message in (
        ({"nodes": "3;4"}, "nodes '3;4' are not whole numbers between commas"),
        ({"temperature": ""}, "temperature '' are not numbers"),
        ({"out": questions}, "is an input as well"),
        ({"drafts": (tmp_path / "3-9",) * 2}, "is named twice"),
    ):
        given = {"drafts": (tmp_path / "3-9",), "out": out, **options, **changes}
        with pytest.raises(LayerwaveError, match=message):
            Evaluate("mini", **given).run()
