"""From conversations to token ids: one BOS, the chat template, the seeded choice, buckets."""

import re

import numpy as np
import pytest
from conftest import TEMPLATE, make_tokenizer

from layerwave.calibration import CalibrationSettings, read_conversations
from layerwave.calibration.tokens import batches, bucket, draw_samples, encode, fingerprint
from layerwave.errors import LayerwaveError

BOS, EOS, USER, ASSISTANT = range(4)
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}
LONG_CHAT = {"messages": [{"role": "user", "content": "x" * 40}]}
LLAMA_DATE = (  # as in the templates of Llama 3.2
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}"
    "{%- endif %}{%- endif %}{{- 'Today Date: ' + date_string }}"
)


def ids_of(tokenizer, row):
    (conversation,) = read_conversations([row])
    return encode(tokenizer, conversation)


@pytest.mark.parametrize("habit", [True, False])
@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.removeprefix("{{ bos_token }}"), "{{ bos_token }}" + TEMPLATE])
def test_a_chat_starts_with_one_bos_or_none(habit, template):
    ids = ids_of(make_tokenizer(bos=habit, template=template), CHAT)
    expected_bos = habit or template.startswith("{{ bos_token }}")
    assert ids.count(BOS) == expected_bos
    rest = ids[expected_bos:]
    assert (rest[0], rest[3], rest[4]) == (USER, EOS, ASSISTANT)
    assert len(rest) == 8


@pytest.mark.parametrize(("habit", "text", "count"), [(True, "ab", 1), (False, "ab", 0), (True, "<s>ab", 1)])
def test_a_text_has_a_bos_where_the_tokenizer_has_the_habit(habit, text, count):
    ids = ids_of(make_tokenizer(bos=habit, template=None), {"text": text})
    assert (ids[:count], ids.count(BOS), len(ids)) == ([BOS] * count, count, 2 + count)


def test_a_conversation_without_a_template_is_an_error():
    with pytest.raises(LayerwaveError, match=r"row 1: a conversation, but .* no chat template: put"):
        ids_of(make_tokenizer(bos=True, template=None), CHAT)


def test_the_date_of_a_chat_template_is_pinned():
    tokenizer = make_tokenizer(bos=True, template=LLAMA_DATE)
    assert ids_of(tokenizer, CHAT) == ids_of(tokenizer, {"text": "Today Date: 26 Jul 2024"})
    assert "26 Jul 2024" not in tokenizer.apply_chat_template(CHAT["messages"], tokenize=False)  # left to itself: today


def draw(rows, template=TEMPLATE, vocab_size=262, extra=(), **settings):
    tokenizer = make_tokenizer(bos=True, template=template)
    tokenizer.add_tokens(list(extra))
    return draw_samples(tokenizer, vocab_size, read_conversations(rows), CalibrationSettings(**settings))


@pytest.mark.parametrize(
    ("template", "row", "warnings"),
    [
        ("{{ strftime_now('%Y') }}" + TEMPLATE, LONG_CHAT, 1),
        ("{{ strftime_now('%Y') }}" + TEMPLATE, {"text": "x" * 40}, 0),
        (LLAMA_DATE + TEMPLATE, LONG_CHAT, 0),
        (TEMPLATE, LONG_CHAT, 0),
    ],
)
def test_a_template_that_insists_on_today_is_reported_once(caplog, template, row, warnings):
    draw([row, row], template=template)
    assert [record.message.startswith("the chat template writes today's date") for record in caplog.records] == (
        [True] * warnings
    )


def test_tokens_outside_the_vocabulary_are_refused_and_unused_ones_are_not():
    plain, extra = {"text": "x" * 40}, {"text": "x" * 40 + "<|extra|>"}
    assert len(draw([plain], extra=["<|extra|>"]).ids) == 1
    assert draw([extra], vocab_size=263, extra=["<|extra|>"]).ids[0][-1] == 262
    assert len(draw([extra], extra=["<|extra|>"], max_length=41).ids) == 1  # cut before the model sees it
    with pytest.raises(
        LayerwaveError, match=r"row 1: token 262 \('<\|extra\|>'\) is outside the model's vocabulary of 262: use"
    ):
        draw([extra], extra=["<|extra|>"])


def test_the_seed_decides_which_rows_are_drawn():
    rows = [{"text": chr(97 + i) * 40} for i in range(20)]
    first, again, other = (draw(rows, samples=5, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.fingerprints, again.fingerprints)
    assert set(first.fingerprints) != set(other.fingerprints)
    assert (len(first.ids), first.tallies["rows"], first.tallies["rows not drawn"]) == (5, 20, 15)
    assert len(draw(rows, samples=20).ids) == len(draw(rows, samples=200).ids) == 20


def test_what_is_cut_or_dropped_is_counted():
    rows = [{"text": "a" * 30}, {"text": "b" * 31}, {"text": "c" * 99}, {"text": "d" * 100}, {"text": ""}]
    samples = draw(rows, max_length=100)
    assert sorted(map(len, samples.ids)) == [32, 100, 100]
    assert samples.tallies["samples shorter than a block"] == 1
    assert samples.tallies["samples cut to max_length"] == 1
    assert (samples.tallies["rows"], samples.tallies["rows without a word"]) == (5, 1)


def test_every_sample_shorter_than_a_block():
    with pytest.raises(
        LayerwaveError, match=r"shorter than a block of 32 tokens \(2 samples, the longest of 21 tokens"
    ):
        draw([{"text": "a" * 20}, {"text": "b"}])


def test_conversations_that_the_template_refuses_are_counted_and_all_of_them_an_error():
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TEMPLATE
    refused = {"messages": [{"role": "assistant", "content": "x" * 40}]}
    samples = draw([refused, LONG_CHAT], template=strict)
    assert (len(samples.ids), samples.tallies["rows refused by the chat template"]) == (1, 1)
    with pytest.raises(LayerwaveError, match=r"refuses every conversation, first row 1 \(TemplateError: user first\)"):
        draw([refused], template=strict)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{{ 1 // (messages|length - 1) }}", "ZeroDivisionError: "),
        ("{{ 'a' + messages|length }}", "TypeError: can only concatenate str"),
        ("{{ messages", "TemplateSyntaxError: "),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(fault, message):
    expected = re.escape(f"refuses every conversation, first row 1 ({message}")
    with pytest.raises(LayerwaveError, match=expected) as caught:
        draw([LONG_CHAT], template=fault + TEMPLATE)
    assert "\n" not in str(caught.value)


def test_a_repeated_conversation_counts_each_time_under_its_own_fingerprint():
    samples = draw([{"text": "a" * 40}] * 3)
    assert len(set(samples.fingerprints)) == 3
    assert fingerprint(samples.ids[0]) == samples.fingerprints[0]


def test_the_fingerprint_is_the_start_of_a_sha256():
    # printf '\x01\0\0\0\x02\0\0\0' | sha256sum starts with 34fb5c825de7ca4a
    assert fingerprint(np.array([1, 2], np.int32)).tobytes().hex() == "34fb5c825de7ca4a"


@pytest.mark.parametrize(("length", "width"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 200), (200, 200)])
def test_buckets_are_powers_of_two_up_to_the_greatest_length(length, width):
    assert bucket(length, 200) == width


def test_batches_hold_every_sample_once_in_few_shapes():
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 99, length).astype(np.int32) for length in rng.integers(32, 2049, 150)]
    plan = list(batches(ids, 2048, 4096))
    assert sorted(index for batch in plan for index in batch.samples) == list(range(150))
    assert {batch.tokens.shape[1] for batch in plan} <= {64, 128, 256, 512, 1024, 2048}
    assert len({batch.tokens.shape for batch in plan}) == len({batch.tokens.shape[1] for batch in plan})
    for batch in plan:
        assert batch.tokens.size <= 4096
        for row, index in enumerate(batch.samples):
            np.testing.assert_array_equal(batch.tokens[row, : batch.lengths[row]], ids[index])
            assert not batch.tokens[row, batch.lengths[row] :].any()
        assert not batch.lengths[len(batch.samples) :].any()


def test_a_sample_longer_than_the_budget_is_a_batch_of_one():
    (batch,) = batches([np.ones(900, np.int32)], 2048, 256)
    assert batch.tokens.shape == (1, 1024)


@pytest.mark.parametrize("batch_tokens", [0, -2048])
def test_a_batch_holds_a_token_at_least(batch_tokens):
    with pytest.raises(LayerwaveError, match=f"batch_tokens is {batch_tokens}, but must be >= 1"):
        list(batches([np.ones(40, np.int32)], 2048, batch_tokens))
