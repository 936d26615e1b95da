"""Every form of conversations that people have, and every way in which a file can be wrong."""

import json

import pytest

from layerwave.calibration import read_conversations
from layerwave.calibration.conversations import Turn
from layerwave.errors import LayerwaveError

SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "id": 7}
SHAREGPT_ROLES = {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
TEXT = {"text": "Once upon a time"}
CHAT = (Turn("user", "Hi"), Turn("assistant", "Hello"))


def write(tmp_path, content, name="data.json"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("row", [SHAREGPT, SHAREGPT_ROLES, OPENAI])
@pytest.mark.parametrize(
    "form",
    [
        lambda row: json.dumps([row, row]),
        lambda row: json.dumps([row, row], indent=2),
        lambda row: "\n" + json.dumps(row) + "\r\n\n" + json.dumps(row) + "\n",
        lambda row: "\ufeff" + json.dumps([row, row]),
        lambda row: json.dumps(row) + "\r" + json.dumps(row) + "\r",
    ],
)
@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_the_content_decides_about_the_form(tmp_path, row, form, name):
    conversations = read_conversations(write(tmp_path, form(row), name))
    assert [conversation.turns for conversation in conversations] == [CHAT, CHAT]
    assert conversations.unusable == 0


@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_is_one_row(tmp_path, indent):
    (conversation,) = read_conversations(write(tmp_path, json.dumps(OPENAI, indent=indent)))
    assert conversation.turns == CHAT


def test_plain_texts_and_line_separators_inside_strings(tmp_path):
    lines = [json.dumps({"text": "one\u2028two\x85three"}, ensure_ascii=False), json.dumps(TEXT)]
    first, second = read_conversations(write(tmp_path, "\n".join(lines)))
    assert (first.turns, first.text) == ((), "one\u2028two\x85three")
    assert second.text == "Once upon a time"
    assert second.where.endswith("line 2")


def test_a_list_and_what_was_read_already():
    conversations = read_conversations([SHAREGPT, TEXT])
    assert len(conversations) == 2
    assert read_conversations(conversations) is conversations


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("system", "system"),
        ("developer", "system"),
        ("tool", "tool"),
        ("observation", "tool"),
    ],
)
def test_roles_get_the_names_of_chat_templates(name, role):
    (conversation,) = read_conversations([{"conversations": [{"from": name, "value": "x"}]}])
    assert conversation.turns == (Turn(role, "x"),)


def test_content_may_be_parts_or_null():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]}
    (conversation,) = read_conversations([row])
    assert conversation.turns == (Turn("user", "Hello"), Turn("assistant", ""))


def test_rows_without_a_word_are_counted():
    empty = [{"conversations": []}, {"text": "  "}, {"messages": [{"role": "user", "content": ""}]}]
    conversations = read_conversations([*empty, TEXT])
    assert (len(conversations), conversations.unusable) == (1, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[\n{"text": "a"},\n{"text": }\n]', r"data.json, line 3: malformed JSON .*column 10"),
        ('{"text": "a"}\n\n{"text": "b"\n', r"data.json, line 3: malformed JSON"),
        ('[{"text": "a"}', r"line 1: malformed JSON"),
        ("plain words", r"line 1: malformed JSON"),
        ('{\n"messages": [\n{"role": "user",\n"content": }\n]\n}', r"data.json, line 4: malformed JSON .*column 12"),
        ('\n{"messages": [\n{"role": "alien", "content": "x"}]}', r"data.json, line 2, turn 1: unknown role"),
        ('{"text": "a"}\r{"text": }', r"line 2: malformed JSON .*column 10"),
        (b'{"text": "a"}\r{"text": "\xff"}', r"line 2: not UTF-8"),
        ("[" * 100_000, r"data.json, from line 1 on: nested too deeply"),
        ('{"text": "a"}\n{"text": ' + "[" * 100_000, r"data.json, from line 2 on: nested too deeply"),
        ('{"text": "a"}\n{"text": "b", "id": ' + "9" * 5000 + "}", r"from line 2 on: a number with too many digits"),
        ("", r"data.json is empty"),
        (" \n", r"data.json is empty"),
        (b'{"text": "a"}\n{"text": "\xff"}', r"line 2: not UTF-8 \(byte 0xff\)"),
        ("[]", r"no usable conversation \(0 rows"),
        ('[{"text": ""}]', r"no usable conversation \(1 rows"),
        ('[{"text": "a"}, 3]', r"row 2: a int, but must be an object"),
        ('{"text": "a"}\n[1]', r"line 2: a list, but must be an object"),
        ('[{"prompt": "a"}]', r"row 1: has the keys \['prompt'\]"),
        ('[{"text": 3}]', r"row 1: text is not text"),
        ('[{"messages": "hi"}]', r"row 1: messages is not a list"),
        ('[{"messages": ["hi"]}]', r"row 1, turn 1: a str"),
        ('[{"messages": [{"role": "user"}]}]', r"row 1, turn 1: lacks 'content'"),
        ('[{"conversations": [{"from": "human"}]}]', r"row 1, turn 1: lacks 'value'"),
        ('[{"conversations": [{"value": "x"}]}]', r"row 1, turn 1: lacks 'role'"),
        ('{"text": "a"}\n{"messages": [{"role": "alien", "content": "x"}]}', r"line 2, turn 1: unknown role 'alien'"),
        ('[{"text": "\\ud83d"}]', r"row 1: text holds half a surrogate pair"),
    ],
)
def test_faults_name_the_place(tmp_path, content, message):
    with pytest.raises(LayerwaveError, match=message) as caught:
        read_conversations(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(LayerwaveError, match=r"cannot read .*absent.json \(No such file"):
        read_conversations(tmp_path / "absent.json")


def test_the_real_sharegpt_file(shared_data):
    conversations = read_conversations(shared_data / "merged_sharegpt.json")
    assert (len(conversations), conversations.unusable) == (1100, 0)
    assert sum(turn.role == "system" for row in conversations for turn in row.turns) == 80
