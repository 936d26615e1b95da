"""Prompts for the bundled target to answer: every fourth of the conversations that it was trained on.

  python benchmarks/mini_prompts.py --data DIR --out prompts.jsonl
  layerwave distill mini prompts.jsonl --out answers.jsonl --max-new-tokens 200 --batch 100

DIR is that of train_mini_target.py. Every kind of text comes with its share: arithmetic, role-play, code.
"""

import argparse
import json
from pathlib import Path

from train_mini_target import read_conversations

EVERY = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    prompts = [prompt for prompt, _ in read_conversations(options.data)[::EVERY]]
    options.out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    print(f"{len(prompts):,} prompts in {options.out}")


if __name__ == "__main__":
    main()
