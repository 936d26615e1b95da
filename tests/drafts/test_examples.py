"""Loss masks under templates in the style of real ones, against spans that a regular expression finds."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from layerwave.calibration import read_conversations
from layerwave.calibration.conversations import Conversations
from layerwave.calibration.tokens import TEMPLATE_DATE, encode, fingerprint
from layerwave.drafts.examples import examples
from layerwave.errors import LayerwaveError
from layerwave.targets.target import MINI_FOLDER

SPECIALS = (
    "<s> </s> <|im_start|> <|im_end|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> "
    "<start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|end|> <|return|>"
).split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: {{ date_string }}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (  # knows no generation prompt: the user's turn ends with it
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PHI3 = (  # a whole conversation ends with a token that no answer does
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
VICUNA = (
    "A chat. {% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
    "{% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
HEADLESS = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
STYLES = {  # template, header, end of turn
    "chatml": (CHATML, "<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": (LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "gemma": (GEMMA, "<start_of_turn>model\n", "<end_of_turn>"),
    "mistral": (MISTRAL, "[/INST]", "</s>"),
    "phi3": (PHI3, "<|assistant|>\n", "<|end|>"),
    "vicuna": (VICUNA, "ASSISTANT:", "</s>"),
    "headless": (HEADLESS, "<|assistant|>", "</s>"),
}
QWEN3 = (  # reasoning only in answers after the last question, where an empty block stands for none
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (  # the prompt opens a block of reasoning, and no answer keeps one
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
HARMONY = (  # the last answer ends with a token of its own
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat(*contents, system=None):
    """Turns of user and assistant in turn."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": [{"role": "system", "content": system}] * (system is not None) + turns}


CHAT = chat(
    "Was heißt naïve? 😀\n\nSag es.",
    "Naïve 😀 heißt einfach.\n\nUnd mehr:\n- 日本語も",
    "Naïve 😀 heißt einfach.\n\nUnd mehr:\n- 日本語も",  # the answer, repeated by the user
    "Naïve 😀 heißt einfach.\n\nUnd mehr:\n- 日本語も",
    "Say nothing.",
    "",
    "Say  something.",
    "Something  said. ",
    "Thanks!",
)


def make_tokenizer(template, *, trim=False, bos=False):
    """Byte-level BPE with merges of words, spaces and newlines; `trim`: offsets without leading spaces, as Llama-3."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = " heißt einfach. Und mehr:\n\n\n- said  something  naïve <think>\n\n</think>\n\n"
    core.train_from_iterator([corpus] * 9, trainer)
    bos_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    parts = [processors.ByteLevel(trim_offsets=True)] * trim + [bos_processor] * bos
    if parts:
        core.post_processor = processors.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template)


def spans_of(text, header, end):
    """Literal reference: everything between a header and the end of its turn, that end included."""
    found = re.finditer(re.escape(header) + "(.*?" + re.escape(end) + ")", text, re.DOTALL)
    return [match.span(1) for match in found if match[1].removesuffix(end).strip()]


def marked(tokenizer, ids, text, spans):
    """Literal reference: counts bytes token by token, and marks those that begin in a span of characters."""
    spans = [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans]
    special = {token: content.content for token, content in tokenizer.added_tokens_decoder.items()}
    place, mask = 0, []
    for token in ids:
        content = special.get(token)
        length = len(content.encode()) if content else len(tokenizer.convert_ids_to_tokens(int(token)))
        mask.append(any(start <= place < stop for start, stop in spans))
        place += length
    assert place == len(text.encode())
    return np.array(mask)


def said(tokenizer, example):
    """The marked text, one string a run of marked tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.loss_mask, [0]])))
    return [tokenizer.decode(example.tokens[first:last]) for first, last in edges.reshape(-1, 2)]


def rendering(tokenizer, row):
    return tokenizer.apply_chat_template(row["messages"], tokenize=False, date_string=TEMPLATE_DATE)


def make(tokenizer, rows, max_length=4096, vocab_size=None):
    return examples(tokenizer, vocab_size or len(tokenizer), rows, max_length)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("trim", [False, True])
def test_the_mask_covers_the_answers_and_their_end_tokens(style, trim):
    template, header, end = STYLES[style]
    tokenizer = make_tokenizer(template, trim=trim)
    (example,) = make(tokenizer, [CHAT])
    text = rendering(tokenizer, CHAT)
    assert list(example.tokens) == encode(tokenizer, read_conversations([CHAT])[0])
    spans = spans_of(text, header, end)
    assert len(spans) == 3  # the empty one is context
    np.testing.assert_array_equal(example.loss_mask, marked(tokenizer, example.tokens, text, spans))
    assert said(tokenizer, example) == [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize("style", STYLES)
def test_a_leading_bos_is_context(style):
    template = STYLES[style][0]
    with_habit, without = make_tokenizer(template, bos=True), make_tokenizer(template)
    (example,) = make(with_habit, [CHAT])
    (plain,) = make(without, [CHAT])
    assert (example.tokens == 0).sum() == 1
    assert example.tokens[0] == 0
    assert not example.loss_mask[0]
    added = len(example.tokens) - len(plain.tokens)
    np.testing.assert_array_equal(example.loss_mask[added:], plain.loss_mask)
    assert list(example.tokens) == encode(with_habit, read_conversations([CHAT])[0])


TOKENIZERS = {style: [make_tokenizer(STYLES[style][0], trim=trim) for trim in (False, True)] for style in STYLES}
WORDS = st.text(st.sampled_from("ab \n.ï😀語:-"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(style=st.sampled_from(sorted(STYLES)), trim=st.booleans(), contents=st.lists(WORDS, min_size=2, max_size=6))
def test_the_mask_of_any_text(style, trim, contents):
    """Newlines and spaces at the edges of answers merge with what the template writes there."""
    _, header, end = STYLES[style]
    tokenizer, row = TOKENIZERS[style][trim], chat("Hi", *contents[1:])
    text = rendering(tokenizer, row)
    reference = spans_of(text, header, end)
    if not reference:
        return
    (example,) = make(tokenizer, [row])
    np.testing.assert_array_equal(example.loss_mask, marked(tokenizer, example.tokens, text, reference))


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (CHATML, "\n\nWell"),  # "assistant\n" and "\n\n": the tokens are "\n\n" and "\n"
        (VICUNA.replace("ASSISTANT:{%", "ASSISTANT: {%"), "said"),  # a prompt that ends with a space
    ],
)
def test_a_token_across_the_edge_of_the_header_is_not_marked(template, answer, trim):
    tokenizer, question = make_tokenizer(template, trim=trim), [{"role": "user", "content": "Hi"}]
    (example,) = make(tokenizer, [chat("Hi", answer)])
    first = int(np.flatnonzero(example.loss_mask)[0])
    before, through = (tokenizer.decode(example.tokens[:count]) for count in (first - 1, first))
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert len(before) < len(prompt) < len(through)
    assert example.loss_mask[first:].sum() == len(tokenizer(said(tokenizer, example)[0]).input_ids)


def test_reasoning_is_learnt_in_every_turn_though_later_turns_drop_it():
    tokenizer = make_tokenizer(QWEN3)
    first = "<think>\nOne and one.\n</think>\n\nTwo."
    row = chat("1+1?", first, "And 2+2?", "Four.")
    early, late = made = make(tokenizer, [row])
    assert said(tokenizer, early) == [first + "<|im_end|>"]
    assert said(tokenizer, late) == ["<think>\n\n</think>\n\nFour.<|im_end|>"]  # as the template writes it
    for example, turns in ((early, 2), (late, 4)):
        cut = {"messages": row["messages"][:turns]}
        assert list(example.tokens) == encode(tokenizer, read_conversations([cut])[0])
        assert example.where == "row 1"
    assert made.tallies["rows in several examples"] == 1
    (single,) = make(tokenizer, [chat("1+1?", first, "Thanks")])  # a last question drops the reasoning as well
    np.testing.assert_array_equal(single.tokens, early.tokens)


def test_a_prompt_that_opens_what_no_answer_keeps():
    tokenizer = make_tokenizer(R1)
    (example,) = make(tokenizer, [chat("1+1?", "<think>\nOne and one.\n</think>Two.", "2+2?", "<thinking> Four.")])
    assert said(tokenizer, example) == ["Two.</s>", "<thinking> Four.</s>"]


def test_an_end_token_that_later_turns_replace():
    tokenizer = make_tokenizer(HARMONY)
    made = make(tokenizer, [chat("a", "b", "c", "d")])
    assert [said(tokenizer, example) for example in made] == [["b<|return|>"], ["d<|return|>"]]


def test_a_template_without_an_end_token():
    tokenizer = make_tokenizer("{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}")
    (example,) = make(tokenizer, [chat("a", "b c", "d", "e f")])
    assert [text.rstrip("\n") for text in said(tokenizer, example)] == ["b c", "e f"]


def test_tools_and_systems_are_context():
    tokenizer = make_tokenizer(CHATML)
    row = chat("Weather?", "I ask.", system="Be brief.")
    row["messages"] += [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}]
    (example,) = make(tokenizer, [row])
    assert said(tokenizer, example) == ["I ask.<|im_end|>", "Sunny.<|im_end|>"]


def test_an_answer_to_nothing_is_context():
    tokenizer = make_tokenizer(CHATML)
    welcome = {"role": "assistant", "content": "Welcome"}
    (example,) = make(tokenizer, [{"messages": [welcome, *chat("a", "b")["messages"]]}])
    assert said(tokenizer, example) == ["b<|im_end|>"]


def test_of_a_plain_text_all_but_a_bos_is_learnt():
    tokenizer = make_tokenizer(None, bos=True)
    (example,) = make(tokenizer, [{"text": "naïve <|im_end|> text"}])
    np.testing.assert_array_equal(example.loss_mask, np.arange(len(example.tokens)) > 0)
    assert list(example.tokens) == encode(tokenizer, read_conversations([{"text": "naïve <|im_end|> text"}])[0])


def test_what_is_cut_or_left_out_is_counted():
    tokenizer = make_tokenizer(GEMMA)
    rows = [
        chat("a" * 50, "late"),
        chat("a", "b" * 60),
        chat("a", ""),
        chat("a", "b", system="refused"),
        {"text": ""},
        {"text": "ab"},  # the first two tokens are never predicted
    ]
    made = make(tokenizer, rows, max_length=40)
    assert [len(example.tokens) for example in made] == [40]
    assert made[0].loss_mask.any()
    assert made.tallies == {
        "rows": 6,
        "rows without a word": 1,
        "rows refused by the chat template": 1,
        "rows without an answer": 1,
        "rows in several examples": 0,
        "examples cut to max_length": 2,
        "examples with nothing to predict": 2,
    }


def test_counts_are_of_what_is_predicted():
    tokenizer = make_tokenizer(CHATML)
    made = make(tokenizer, [chat("x", "zz z"), {"text": "zzzz"}])
    z, end = tokenizer("z").input_ids[0], tokenizer.convert_tokens_to_ids("<|im_end|>")
    counts = made.counts()
    assert (counts[z], counts[end], len(counts)) == (3 + 2, 1, len(tokenizer))


def test_fingerprints_are_those_of_the_tokens_and_unique():
    tokenizer = make_tokenizer(CHATML)
    made = make(tokenizer, [CHAT, CHAT])
    assert made[0].fingerprint == fingerprint(made[0].tokens) != made[1].fingerprint


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }} {{ m.content }}</s>{% endfor %}",  # writes an answer twice
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.role == 'user' }}</s>{% endfor %}",  # or not at all
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper }}</s>{% endfor %}",  # or otherwise
    ],
)
def test_an_answer_that_cannot_be_found_is_refused_by_name(template):
    with pytest.raises(LayerwaveError, match=r"first row 1 \(the answer in turn 2 cannot be told"):
        make(make_tokenizer(template), [chat("a", "b")])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([chat("a"), chat("b", " ")], r"not one token to predict in 2 conversations \(2 without an answer"),
        ([chat("a" * 99, "b")], r"0 without an answer, 1 whose answers are short or begin after max_length 40"),
    ],
)
def test_nothing_to_predict_is_an_error(rows, message):
    with pytest.raises(LayerwaveError, match=message):
        make(make_tokenizer(CHATML), rows, max_length=40)


def test_other_faults():
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(LayerwaveError, match="max_length is 2"):
        make(tokenizer, [CHAT], max_length=2)
    with pytest.raises(LayerwaveError, match=r"row 1: token .* is outside the model's vocabulary of 100"):
        make(tokenizer, [CHAT], vocab_size=100)
    with pytest.raises(LayerwaveError, match="has no chat template"):
        make(make_tokenizer(None), [CHAT])


@pytest.fixture(scope="module")
def mini_tokenizer():
    return PreTrainedTokenizerFast.from_pretrained(MINI_FOLDER)


def check_chatml(tokenizer, rows, max_length=1024):
    """Every example of a file against the regular expression; answers are marked exactly once."""
    made = examples(tokenizer, len(tokenizer), rows, max_length)
    for example in made:
        text = tokenizer.decode(example.tokens)
        spans = [
            match.span(1)
            for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>|[^<]*$)", text, re.DOTALL)
            if match[1].removesuffix("<|im_end|>").strip()
        ]
        np.testing.assert_array_equal(example.loss_mask, marked(tokenizer, example.tokens, text, spans))
    return made


def test_the_bundled_conversations(mini_tokenizer):
    made = check_chatml(mini_tokenizer, MINI_FOLDER.parent / "conversations.jsonl")
    assert len(made) == made.tallies["rows"]


def test_real_conversations(mini_tokenizer, shared_data):
    conversations = read_conversations(shared_data / "merged_sharegpt.json")
    made = check_chatml(mini_tokenizer, Conversations(conversations[:100], 0), 1 << 20)
    assert len(made) > 90
