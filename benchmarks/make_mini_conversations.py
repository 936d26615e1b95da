"""Lets the bundled mini target answer the bundled prompts: layerwave/assets/conversations.jsonl.

  python benchmarks/make_mini_conversations.py

Each line of layerwave/assets/prompts.jsonl is a conversation's user turns, written for this project. Answers are
sampled at temperature 0.7, seeded; an answer that reaches the limit is kept without its last, possibly broken, token.
"""

import json
from pathlib import Path

import jax

import layerwave as lw
from layerwave.decoding import GenerationSettings, generate

ASSETS = Path(lw.__file__).parent / "assets"
BATCH = 16


def main() -> None:
    target = lw.load_target("mini")
    settings = GenerationSettings(max_new_tokens=256, temperature=0.7, end_token=target.tokenizer.eos_token_id)
    prompts = [json.loads(line)["turns"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    conversations = [[] for _ in prompts]
    for turn in range(max(map(len, prompts))):
        open_ones = [i for i, turns in enumerate(prompts) if turn < len(turns)]
        for i in open_ones:
            conversations[i].append({"role": "user", "content": prompts[i][turn]})
        for first in range(0, len(open_ones), BATCH):
            chosen = open_ones[first : first + BATCH]
            ids = [
                target.tokenizer.apply_chat_template(conversations[i], add_generation_prompt=True, return_dict=False)
                for i in chosen
            ]
            key = jax.random.fold_in(jax.random.key(0), 1000 * turn + first)
            for i, made in zip(chosen, generate(target.decoder, ids, settings, key), strict=True):
                answer = target.tokenizer.decode(made[:-1], skip_special_tokens=True).strip()
                conversations[i].append({"role": "assistant", "content": answer})
        print(f"turn {turn + 1}: {len(open_ones)} answers", flush=True)
    with (ASSETS / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for messages in conversations:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
