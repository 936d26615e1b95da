"""The bundled mini target: small enough, whole, and the same model to torch transformers as to us."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.calibration import read_conversations
from layerwave.targets import load_target
from layerwave.targets.target import MINI_FOLDER
from tests.targets.test_parity import assert_parity, greedy_with_cache
from tests.targets.variants import greedy, reference

ASSETS = MINI_FOLDER.parent


@pytest.fixture(scope="module")
def mini():
    return load_target("mini")


def test_size_and_depth(mini):
    assert sum(path.stat().st_size for path in MINI_FOLDER.iterdir()) <= 8_000_000
    assert mini.config.num_layers >= 12
    assert 2_000 <= mini.config.vocab_size <= 4_096
    assert len(mini.tokenizer) == mini.config.vocab_size


def test_tokenizer_is_lossless_and_its_template_marks_turns(mini):
    text = "Tom has 12 pears, 3 × more than José.\n\tfor i in range(10): print(i)  # ok 🍐"
    assert mini.tokenizer.decode(mini.tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = mini.tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    special = mini.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = mini.tokenizer(rendered, add_special_tokens=False).input_ids
    assert [i for i in ids if i in special] == special * 2


def test_bundled_conversations_answer_the_bundled_prompts():
    prompts = [json.loads(line)["turns"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    rows = [json.loads(line)["messages"] for line in (ASSETS / "conversations.jsonl").read_text().splitlines()]
    assert len(rows) == len(prompts) >= 64
    assert [[m["content"] for m in row if m["role"] == "user"] for row in rows] == prompts
    assert all(row[-1]["role"] == "assistant" and row[-1]["content"] for row in rows)
    assert read_conversations(ASSETS / "conversations.jsonl").unusable == 0


@pytest.mark.parity
def test_torch_transformers_loads_the_same_model(mini):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MINI_FOLDER, dtype=torch.float32).eval()
    conversations = (ASSETS / "conversations.jsonl").read_text().splitlines()[:8]
    text = "".join(
        mini.tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in conversations
    )
    tokens = np.array(mini.tokenizer(text, add_special_tokens=False).input_ids[: mini.config.max_positions])
    assert_parity(mini.decoder, tokens, slice(None), *reference(model, torch.tensor(tokens)))
    assert greedy_with_cache(mini.decoder, tokens[:40].tolist(), 40) == greedy(model, tokens[:40].tolist(), 40)
    assert mini.decoder.dtype == jnp.float32
