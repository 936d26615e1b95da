"""Answers against a literal loop without cache or batch; interrupted runs against uninterrupted ones, byte for byte."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from layerwave.calibration import read_conversations
from layerwave.commands.distill import Distill
from layerwave.decoding.distill import DistillSettings, distill, end_tokens
from layerwave.drafts.examples import examples
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, Target
from tests.configs import QWEN3

SPECIALS = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
VOCABULARY = [*SPECIALS, *"abcd ?"]
TEMPLATE = (
    "{% if messages[0].content == 'd' %}{{ raise_exception('no') }}{% endif %}<s>"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG = replace(QWEN3, num_layers=2, vocab_size=len(VOCABULARY))
ROWS = [
    {"prompt": "ab?"},
    {"turns": ["cc a?", "bb?", "ab ba?"]},
    {"messages": [{"role": "system", "content": "abc"}, {"role": "user", "content": "dd?"}]},
    {
        "conversations": [
            {"from": "human", "value": "cab?"},
            {"from": "gpt", "value": "an answer of another model, which the target never sees"},
            {"from": "human", "value": "bad?"},
        ]
    },
    {"prompt": "ab?"},
    {"prompt": "a b c d?"},
    {"turns": ["bb?", "c?"]},
]
SAMPLED = DistillSettings(max_new_tokens=9, temperature=1.5, seed=3, batch=2)


def make_target(**changes):
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCABULARY)}, []))
    core.add_special_tokens(SPECIALS)
    core.decoder = decoders.Fuse()
    tokens = {"bos_token": "<s>", "eos_token": "</s>", **changes}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **tokens)
    return Target("tiny", CONFIG, Decoder(CONFIG, rngs=nnx.Rngs(1)), tokenizer, "0123456789abcdef")


@pytest.fixture(scope="module")
def target():
    return make_target()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions_of(row):
    turns = row.get("messages") or row.get("conversations")
    if turns is None:
        return [("user", text) for text in row.get("turns", [row.get("prompt")])]
    turns = [(turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in turns]
    return [(role.replace("human", "user"), text) for role, text in turns if role in ("user", "human", "system")]


@pytest.fixture(scope="module")
def sampled(target, tmp_path_factory):
    """An uninterrupted run: its bytes, its tallies, its description."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    made = distill(target, ROWS, out, SAMPLED)
    return out.read_bytes(), made.tallies, (out.parent / "out.jsonl.run.json").read_bytes()


def test_greedy_answers_are_those_of_a_literal_loop(target, tmp_path):
    out = tmp_path / "out.jsonl"
    made = distill(target, ROWS, out, DistillSettings(max_new_tokens=6, batch=3))
    best = nnx.jit(lambda decoder, tokens, length: decoder.logits(decoder(tokens).normed[0, length - 1]).argmax())
    tokenizer, cut = target.tokenizer, 0
    for row, result in zip(ROWS, rows_of(out), strict=True):
        turns, truncated = [], 0
        for role, text in questions_of(row):
            turns.append({"role": role, "content": text})
            if role != "user":
                continue
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            answer = []
            while len(answer) < 6 and tokenizer.eos_token_id not in answer:
                padded = jnp.asarray([(ids + answer + [0] * 96)[:96]], jnp.int32)
                answer.append(int(best(target.decoder, padded, len(ids) + len(answer))))
            truncated += answer[-1] != tokenizer.eos_token_id
            turns.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        assert result["conversations"] == turns
        assert result["truncated"] == truncated
        cut += truncated
    assert made.tallies["answers cut at max_new_tokens"] == cut
    assert made.tallies["answers"] == 11


def test_samples_end_at_end_tokens_or_are_flagged(sampled):
    content, tallies, _ = sampled
    rows = [json.loads(line) for line in content.splitlines()]
    assert 0 < tallies["answers cut at max_new_tokens"] == sum(row["truncated"] for row in rows) < tallies["answers"]
    assert tallies["tokens"] <= 9 * tallies["answers"]
    assert [turn["content"] for turn in rows[1]["conversations"][::2]] == ["cc a?", "bb?", "ab ba?"]
    same, again = rows[0], rows[4]  # one question asked twice
    assert same["id"] != again["id"]
    assert same["conversations"][0] == again["conversations"][0]
    assert same["conversations"][1] != again["conversations"][1]


@pytest.mark.parametrize(("rows", "batch"), [(ROWS[::-1], 2), (ROWS[1:4], 3), (ROWS[2:3], 1)])
def test_a_sample_does_not_depend_on_the_rest_of_the_file(target, tmp_path, sampled, rows, batch):
    distill(target, rows, tmp_path / "out.jsonl", DistillSettings(9, 1.5, seed=3, batch=batch))
    whole = {row["id"]: row for row in map(json.loads, sampled[0].splitlines())}
    for row in rows_of(tmp_path / "out.jsonl"):
        assert row == whole[row["id"]]


def test_another_seed_gives_other_samples(target, tmp_path, sampled):
    distill(target, ROWS[:2], tmp_path / "out.jsonl", DistillSettings(9, 1.5, seed=4, batch=2))
    whole = [json.loads(line) for line in sampled[0].splitlines()]
    assert rows_of(tmp_path / "out.jsonl")[1]["conversations"] != whole[1]["conversations"]


class Kill(Exception):
    pass


def interrupted(target, out, after):
    """Runs until `after` batches are done; returns how many conversations each call of progress saw."""
    seen = []

    def progress(done, total, tokens):
        seen.append(done)
        assert total == len(ROWS)
        if len(seen) == after:
            raise Kill

    try:
        distill(target, ROWS, out, SAMPLED, progress=progress)
    except Kill:
        assert not out.exists()
    return seen


@pytest.mark.parametrize("torn", [0, 1, 40, None])  # 1: only the newline; None: all but one byte
def test_a_killed_run_ends_in_the_bytes_of_an_uninterrupted_one(target, tmp_path, sampled, torn):
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    assert interrupted(target, out, 2) == [2, 4]
    content = journal.read_bytes()
    journal.write_bytes(content[:1] if torn is None else content[: len(content) - torn])
    rest = {0: [6, 7], None: [2, 4, 6, 7]}.get(torn, [4, 6, 7])
    assert interrupted(target, out, 1) == rest[:1]  # killed again
    assert interrupted(target, out, 99) == rest[1:]
    assert (out.read_bytes(), (tmp_path / "out.jsonl.run.json").read_bytes()) == (sampled[0], sampled[2])
    assert not journal.exists()


def test_a_finished_run_is_not_repeated(target, tmp_path, sampled):
    out = tmp_path / "out.jsonl"
    distill(target, ROWS, out, SAMPLED)
    again = distill(target, ROWS, out, SAMPLED, progress=lambda *_: pytest.fail("worked again"))
    assert again.tallies == sampled[1]
    assert out.read_bytes() == sampled[0]


@pytest.mark.parametrize(
    ("rows", "changes", "named"),
    [
        (ROWS, {"seed": 4}, "seed"),
        (ROWS, {"temperature": 1.0}, "temperature"),
        (ROWS, {"max_new_tokens": 8}, "max_new_tokens"),
        (ROWS, {"batch": 3}, "batch"),
        (ROWS[:-1], {}, "prompts"),
    ],
)
@pytest.mark.parametrize("state", ["under way", "finished"])
def test_two_runs_are_not_mixed(target, tmp_path, rows, changes, named, state):
    out = tmp_path / "out.jsonl"
    interrupted(target, out, 1 if state == "under way" else 99)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    settings = DistillSettings(**{"max_new_tokens": 9, "temperature": 1.5, "seed": 3, "batch": 2, **changes})
    with pytest.raises(LayerwaveError, match=f"is of a run with other {named} .*remove it, or give another --out"):
        distill(target, rows, out, settings)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_files_that_are_no_work_of_distill(target, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(LayerwaveError, match="no run of distill wrote it"):
        distill(target, ROWS, out, SAMPLED)
    assert out.read_text() == "precious"
    (tmp_path / "other.jsonl.partial").write_text('{"half":\n[]\n')
    with pytest.raises(LayerwaveError, match=r"other.jsonl.partial is damaged .* remove it"):
        distill(target, ROWS, tmp_path / "other.jsonl", SAMPLED)
    with pytest.raises(LayerwaveError, match="cannot be written"):
        distill(target, ROWS, tmp_path / "missing" / "out.jsonl", SAMPLED)


def test_what_cannot_be_asked_or_answered_is_counted(target, tmp_path):
    rows = [
        {"prompt": "d"},  # the template refuses it
        {"prompt": "a" * 90},
        {"turns": ["ab?", "b" * 90]},  # room for the first turn only
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"text": "abc"},
        {"text": " "},
        {"prompt": "a"},
    ]
    made = distill(target, rows, tmp_path / "out.jsonl", DistillSettings(5, batch=4))
    assert {name: count for name, count in made.tallies.items() if name != "tokens"} == {
        "rows": 8,
        "rows without a word": 1,
        "rows that share text with the evaluation": 0,
        "rows with a tool's turn": 1,
        "rows without a user's turn": 2,
        "rows ended by the chat template": 1,
        "rows ended for want of positions": 2,
        "conversations": 2,
        "answers": 2,
        "answers cut at max_new_tokens": made.tallies["answers cut at max_new_tokens"],
    }
    first, second = rows_of(tmp_path / "out.jsonl")
    assert [len(row["conversations"]) for row in (first, second)] == [2, 2]


def test_questions_of_the_evaluation_are_left_out(target, tmp_path):
    evaluation = write(tmp_path / "question.jsonl", [{"turns": ["Cc, a?"]}])
    made = distill(target, write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", SAMPLED, evaluation=evaluation)
    assert made.tallies["conversations"] == len(ROWS) - 1
    (hit,) = made.contaminated
    assert (hit.where, hit.words) == (f"{tmp_path / 'in.jsonl'}, line 2", "cc a")


def test_the_output_is_read_by_calibration_and_training(target, tmp_path):
    out = tmp_path / "out.jsonl"
    made = distill(target, ROWS, out, SAMPLED)
    conversations = read_conversations(out)
    assert len(conversations) == made.tallies["conversations"] == len(ROWS)
    assert sum(turn.role == "assistant" for row in conversations for turn in row.turns) == made.tallies["answers"]
    assert len(examples(target.tokenizer, CONFIG.vocab_size, out, 96)) > 0


def test_end_tokens_are_those_of_tokenizer_and_generation_config(tmp_path):
    target = make_target()
    assert end_tokens(target) == (1,)
    beside = Target(str(tmp_path), *list(vars(target).values())[1:])
    assert end_tokens(beside) == (1,)
    for named, expected in ((5, (1, 5)), ([6, 1, 5], (1, 5, 6)), (None, (1,))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert end_tokens(beside) == expected


def test_any_of_several_end_tokens_ends_an_answer(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    target = Target(str(tmp_path), *list(vars(make_target()).values())[1:])
    made = distill(target, ROWS, tmp_path / "out.jsonl", SAMPLED)
    turns = [turn for row in rows_of(tmp_path / "out.jsonl") for turn in row["conversations"]]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    assert len(answers) == made.tallies["answers"]
    assert not any(letter in answer for answer in answers for letter in "ab")  # tokens 5 and 6


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"text": "abc"}], {}, r"nothing to ask \(1 rows; 1 rows without a user's turn\)"),
        ([{"prompt": "a" * 90}], {}, r"not one answer \(1 rows ended for want of positions\)"),
    ],
)
def test_nothing_to_do_is_an_error(target, tmp_path, rows, settings, message):
    with pytest.raises(LayerwaveError, match=message):
        distill(target, rows, tmp_path / "out.jsonl", DistillSettings(9, batch=2))


def test_a_target_without_end_tokens_is_refused(tmp_path):
    with pytest.raises(LayerwaveError, match="tiny names no end token"):
        distill(make_target(eos_token=None), ROWS, tmp_path / "out.jsonl")


def test_an_end_token_outside_the_vocabulary_is_refused(target, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 4096}))
    beside = Target(str(tmp_path), *list(vars(target).values())[1:])
    with pytest.raises(LayerwaveError, match="end_token is 4096, expected 0 to 10"):
        distill(beside, ROWS, tmp_path / "out.jsonl", SAMPLED)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"batch": 0}, {"seed": -1}])
def test_setting_faults(settings):
    with pytest.raises(LayerwaveError, match=next(iter(settings))):
        DistillSettings(**settings)


def test_the_command_on_the_bundled_target(tmp_path, capsys):
    prompts, out = write(tmp_path / "in.jsonl", [{"prompt": "Hello?"}]), tmp_path / "out.jsonl"
    Distill("mini", prompts, out, DistillSettings(max_new_tokens=3, batch=1), json=True).run()
    printed = json.loads(capsys.readouterr().out)
    assert (printed["out"], printed["tallies"]["conversations"]) == (str(out), 1)
    Distill("mini", prompts, out, DistillSettings(max_new_tokens=3, batch=1)).run()
    assert "1 conversations; 1 answers" in capsys.readouterr().out
