"""Questions: the bundled ones, Spec-Bench's own file, and faults."""

import json
from collections import Counter

import pytest

from layerwave.calibration.conversations import read_prompts
from layerwave.decoding.questions import BUNDLED, COLUMNS, fingerprint, first_of_each, read_questions
from layerwave.drafts.contamination import decontaminate
from layerwave.errors import LayerwaveError

ROW = {"question_id": 7, "category": "qa", "turns": ["Who?"]}


def test_the_bundled_ones_cover_every_category():
    questions = read_questions(BUNDLED)
    assert len(questions) >= 24
    assert {question.category for question in questions} == {c for held in COLUMNS.values() for c in held}
    asked_twice = {question.category for question in questions if len(question.turns) == 2}
    assert asked_twice == set("writing roleplay reasoning math coding extraction stem humanities".split())


def test_the_bundled_ones_were_not_trained_on():
    prompts = read_prompts(BUNDLED.with_name("prompts.jsonl"))
    assert decontaminate(prompts, BUNDLED)[1] == ()
    assert decontaminate(read_prompts(BUNDLED.with_name("conversations.jsonl")), BUNDLED)[1] == ()


def test_spec_bench(shared_data):
    questions = read_questions(shared_data / "spec_bench_question.jsonl")
    columns = Counter(question.column for question in questions)
    assert columns["M/R"] == 100
    assert columns == {"M/R": 100} | dict.fromkeys(("TRANSL", "SUMM", "QA", "RAG"), 80) | dict.fromkeys(
        ("CODING", "EXTR", "HUMAN", "ROLE", "STEM", "WRITING"), 10
    )
    assert sum(len(question.turns) for question in questions) == 560
    chosen = first_of_each(questions, 3)
    assert len(chosen) == 39
    assert [question.id for question in chosen if question.category == "math"] == [111, 112, 113]
    assert len({question.prompt.name for question in questions}) == 480


def test_file_and_list_are_read_alike(tmp_path):
    rows = [ROW, {**ROW, "question_id": "b", "turns": ["One?", "Two?"], "reference": ["an answer"]}]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    questions = read_questions(path)
    assert questions == read_questions(rows)
    assert [(q.id, q.category, q.turns) for q in questions] == [(7, "qa", ("Who?",)), ("b", "qa", ("One?", "Two?"))]
    assert [[turn.content for turn in asked] for asked in questions[1].prompt.questions] == [["One?"], ["Two?"]]


def test_the_fingerprint_is_of_what_is_asked():
    first, second = read_questions([ROW]), read_questions([{**ROW, "reference": "him"}])
    assert fingerprint(first) == fingerprint(second)
    others = [{**ROW, "turns": ["What?"]}, {**ROW, "category": "stem"}, {**ROW, "turns": ["Who?", "Why?"]}]
    assert len({fingerprint(read_questions([row])) for row in [ROW, *others]}) == 4
    rows = [ROW, {**ROW, "question_id": 8}]
    assert fingerprint(read_questions(rows)) != fingerprint(read_questions(rows[::-1]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no questions"),
        ([ROW, ROW], "2 questions have the question_id 7"),
        ([{"question_id": 7, "turns": ["Who?"]}], "row 1: has .*give the fields that are missing"),
        ([{**ROW, "answer": "him"}], "row 1: unknown fields answer"),
        ([{**ROW, "category": "codng"}], "unknown category 'codng', expected one of coding"),
        ([{**ROW, "category": ["qa"]}], "unknown category"),
        ([{**ROW, "question_id": True}], "question_id is True"),
        ([{**ROW, "question_id": 1.5}], "question_id is 1.5"),
        ([{**ROW, "turns": []}], "turns must be a list of texts"),
        ([{**ROW, "turns": "Who?"}], "turns must be a list of texts"),
        ([{**ROW, "turns": ["Who?", " "]}], "turns must be a list of texts"),
        ([{**ROW, "turns": ["\ud83d"]}], "turns must be a list of texts"),
    ],
)
def test_faults(rows, message):
    with pytest.raises(LayerwaveError, match=message):
        read_questions(rows)


def test_faults_of_files_name_the_line(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "extra": 1}) + "\n")
    with pytest.raises(LayerwaveError, match="line 2: unknown fields extra"):
        read_questions(path)
    path.write_text(json.dumps(ROW) + '\n["Who?"]\n')
    with pytest.raises(LayerwaveError, match="line 2: has list"):
        read_questions(path)
    path.write_text("")
    with pytest.raises(LayerwaveError, match=r'is empty: give rows like \{"question_id"'):
        read_questions(path)
    path.write_text("[]")
    with pytest.raises(LayerwaveError, match="no questions"):
        read_questions(path)
