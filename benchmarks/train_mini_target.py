"""Trains the bundled mini target: a 12-layer Qwen3-architecture chat model of 2.9 M parameters with its own tokenizer.

  python benchmarks/train_mini_target.py --data DIR --out DIR [--steps 3600]

DIR holds gsm8k_train.jsonl, gpteacher_roleplay.json and gpteacher_codegen.json (all MIT). One conversation in fifty is
held out, chosen by a hash of its prompt. The result is a Hugging Face directory (bf16 safetensors), rewritten every few
hundred steps, and `training.jsonl` beside it.
"""

import argparse
import hashlib
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from layerwave.targets.checkpoint import save_decoder
from layerwave.targets.config import DecoderConfig
from layerwave.targets.decoder import Decoder

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 4096
SHORT, LONG, STEP_TOKENS = (
    256,
    512,
    2048,
)  # three quarters of the steps on short windows: attention is cheaper there
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def read_conversations(folder: Path) -> list[tuple[str, str]]:
    """(prompt, answer) pairs; the calculator marks of GSM8K are dropped, its answer line put into words."""
    pairs = []
    for line in (folder / "gsm8k_train.jsonl").read_text().splitlines():
        row = json.loads(line)
        answer = re.sub(r"<<.*?>>", "", row["answer"]).replace("\n#### ", "\nThe answer is ")
        pairs.append((row["question"], answer + "."))
    for name in ("gpteacher_roleplay.json", "gpteacher_codegen.json"):
        for row in json.loads((folder / name).read_text()):
            prompt = row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "")
            pairs.append((prompt, row["response"]))
    return [(prompt.strip(), answer.strip()) for prompt, answer in pairs if answer.strip()]


def held_out(prompt: str) -> bool:
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 50 == 0


def render(pair: tuple[str, str]) -> str:
    return "".join(
        f"{START_TURN}{role}\n{text}{END_TURN}\n" for role, text in zip(("user", "assistant"), pair, strict=True)
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; digits stand alone, so that numbers of every length are made of known tokens."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, START_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_TURN,
        "pad_token": END,
        "unk_token": None,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def pack(tokenizer: Tokenizer, texts: list[str], length: int, seed: int) -> np.ndarray:
    """All texts one after the other in a shuffled order, cut into windows of `length + 1` tokens."""
    order = np.random.default_rng(seed).permutation(len(texts))
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch([texts[i] for i in order])
    stream = np.concatenate([np.array([end, *e.ids], np.int32) for e in encoded])
    windows = (len(stream) - 1) // length
    return np.stack([stream[i * length : (i + 1) * length + 1] for i in range(windows)])


def batches(tokenizer: Tokenizer, texts: list[str], steps: int, seed: int) -> Iterator[np.ndarray]:
    """Shuffled batches of STEP_TOKENS tokens, for `steps` steps."""
    short_steps = 3 * steps // 4
    for length, count in ((SHORT, short_steps), (LONG, steps - short_steps)):
        windows = grain.MapDataset.source(pack(tokenizer, texts, length, seed))
        data = windows.shuffle(seed=seed).repeat().batch(STEP_TOKENS // length)
        yield from itertools.islice(iter(data), count)


def mean_loss(graphdef, params, window_bt):
    decoder = nnx.merge(graphdef, params)
    logits = decoder.logits(decoder(window_bt[:, :-1]).normed)
    return optax.softmax_cross_entropy_with_integer_labels(logits, window_bt[:, 1:]).mean()


def nats_per_byte(graphdef, params, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Held-out nats a byte: each conversation alone, after the end token, cut at the longest trained length."""

    @jax.jit
    def losses(params, tokens_bt):
        decoder = nnx.merge(graphdef, params)
        logits = decoder.logits(decoder(tokens_bt[:, :-1]).normed)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_bt[:, 1:])

    end, nats, size = tokenizer.token_to_id(END), 0.0, 0
    for first in range(0, len(texts), 8):
        rows = [[end, *tokenizer.encode(text).ids][: LONG + 1] for text in texts[first : first + 8]]
        tokens = np.zeros((8, LONG + 1), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        loss = np.asarray(losses(params, tokens))
        for i, row in enumerate(rows):
            nats += loss[i, : len(row) - 1].sum()
            size += len(tokenizer.decode(row[1:], skip_special_tokens=False).encode())
    return float(nats / size)


def optimiser(steps: int) -> optax.GradientTransformation:
    """Muon for the matrices, AdamW for embedding and norms; warm-up, then linear decay to zero."""

    def schedule(peak: float) -> optax.Schedule:
        return optax.join_schedules(
            [
                optax.linear_schedule(0.0, peak, 100),
                optax.linear_schedule(peak, 0.02 * peak, max(1, steps - 100)),
            ],
            [100],
        )

    def is_matrix(path, _) -> bool:
        return any(getattr(key, "key", None) == "kernel" for key in path)

    matrices = optax.contrib.MuonDimensionNumbers((1,), (2,))
    muon = optax.contrib.muon(
        schedule(0.02),
        adam_learning_rate=schedule(4e-3),
        adam_b2=0.98,
        weight_decay=0.05,
        muon_weight_dimension_numbers=lambda params: jax.tree_util.tree_map_with_path(
            lambda path, p: matrices if is_matrix(path, p) else None, params
        ),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    pairs = read_conversations(args.data)
    train = [render(pair) for pair in pairs if not held_out(pair[0])]
    test = [render(pair) for pair in pairs if held_out(pair[0])]
    tokenizer = train_tokenizer(train)
    write_tokenizer(tokenizer, args.out)
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2))
    print(f"{len(train)} conversations, {len(test)} held out", flush=True)

    graphdef, params = nnx.split(Decoder(DecoderConfig.from_hf(CONFIG), rngs=nnx.Rngs(args.seed)))
    print(sum(p.size for p in jax.tree.leaves(params)), "parameters", flush=True)
    tx = optimiser(args.steps)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, window_bt):
        loss, grads = jax.value_and_grad(lambda p: mean_loss(graphdef, p, window_bt))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    started, losses = time.time(), []
    with (args.out / "training.jsonl").open("w") as log:
        for i, window_bt in enumerate(batches(tokenizer, train, args.steps, args.seed), 1):
            params, opt_state, loss = step(params, opt_state, window_bt)
            losses.append(float(loss))
            if i % 25 == 0:
                row = {"step": i, "tokens": i * STEP_TOKENS, "loss": round(float(np.mean(losses[-25:])), 4)}
                row["seconds"] = round(time.time() - started)
                if i % 300 == 0 or i == args.steps:
                    row["held_out_nats_per_byte"] = round(nats_per_byte(graphdef, params, tokenizer, test), 4)
                    save_decoder(nnx.merge(graphdef, params), args.out / "model.safetensors", jnp.bfloat16)
                print(json.dumps(row), file=log, flush=True)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
