"""Shared runs of 13 words, and nothing less."""

import json

import pytest

from layerwave.calibration import read_conversations
from layerwave.calibration.conversations import read_prompts
from layerwave.drafts.contamination import Hit, decontaminate
from layerwave.errors import LayerwaveError

WORDS = [f"w{i}" for i in range(20)]
QUESTION = " ".join(WORDS)


def chat(*contents):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def hits(rows, evaluation):
    clean, found = decontaminate(read_conversations(rows), evaluation)
    assert len(clean) + len(found) == len(rows)
    assert not {hit.where for hit in found} & {conversation.where for conversation in clean}
    return [hit.where for hit in found]


@pytest.mark.parametrize(("shared", "hit"), [(12, False), (13, True), (20, True)])
@pytest.mark.parametrize("offset", [0, 3, 7])
def test_thirteen_words_in_a_row_are_a_hit(shared, hit, offset):
    words = ["before"] * 5 + WORDS[offset : offset + shared] + ["after"] * 5
    shared_here = len(WORDS[offset : offset + shared])
    row = chat("Hello there", " ".join(words))
    assert hits([row, chat("x", "y")], [{"turns": ["other", QUESTION]}]) == ["row 1"] * (hit and shared_here >= 13)


def test_case_punctuation_spaces_and_width_do_not_matter():
    row = chat("W0, w1 -- w2!\nW3 'w4' w5; w6... w7\t w8 (w9) w１０ W11 w12?", "y")
    assert hits([row], [{"prompt": QUESTION}]) == ["row 1"]


def test_words_do_not_run_across_turns():
    row = chat(" ".join(WORDS[:7]), " ".join(WORDS[7:]))
    assert hits([row], [{"prompt": QUESTION}]) == ["row 1"]  # the second turn has 13 of its own
    row = chat(" ".join(WORDS[:10]), " ".join(WORDS[10:]))
    assert hits([row], [{"prompt": QUESTION}]) == []


def test_a_shorter_turn_counts_as_a_whole():
    evaluation = [{"turns": ["Name three colours.", "..."]}]
    rows = [chat("name three COLOURS", "a"), chat("Please name three colours", "b"), chat("!", "c")]
    assert hits(rows, evaluation) == ["row 1"]


def test_plain_texts_and_conversations_are_compared_too():
    assert hits([{"text": "so: " + QUESTION}], [chat("a", QUESTION)]) == ["row 1"]


def test_a_hit_names_both_places_and_the_words(tmp_path):
    path = tmp_path / "question.jsonl"
    rows = [{"question_id": 1, "turns": ["other"]}, {"question_id": 2, "turns": [QUESTION]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, found = decontaminate(read_conversations([chat("x", QUESTION.upper())]), path)
    assert found == (Hit("row 1", f"{path}, line 2", " ".join(WORDS[:13])),)


def test_counts_of_rows_without_a_word_stay():
    clean, _ = decontaminate(read_conversations([chat("x", "y"), chat("")]), [{"prompt": "z"}])
    assert (len(clean), clean.unusable) == (1, 1)


def test_an_evaluation_file_that_is_none(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"turns": 3}')
    with pytest.raises(LayerwaveError, match=r"line 1: has the keys \['turns'\]"):
        decontaminate(read_conversations([chat("x", "y")]), path)


def test_spec_bench_hits_itself_and_no_conversation_of_another_source(shared_data):
    questions = read_prompts(shared_data / "spec_bench_question.jsonl")
    assert (len(questions), sum(len(question.turns) for question in questions)) == (480, 560)
    clean, found = decontaminate(questions, shared_data / "spec_bench_question.jsonl")
    assert (len(clean), len(found)) == (0, 480)
    assert decontaminate(read_conversations(shared_data / "merged_sharegpt.json"), questions)[1] == ()
