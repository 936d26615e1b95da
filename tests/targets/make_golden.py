"""Writes tests/targets/golden: checkpoints and what torch transformers computes from them. Needs the parity extra.

python tests/targets/make_golden.py [VARIANT …]
"""

import shutil
import sys

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from variants import GOLDEN, GOLDEN_VARIANTS, POSITIONS, build, greedy, random_tokens, reference


def main() -> None:
    # The first positions, and some of every later region: an error in the rotary angles grows with the position.
    kept = np.unique(np.concatenate([np.arange(4), np.linspace(4, POSITIONS - 1, 28).astype(int)]))
    for variant in sys.argv[1:] or GOLDEN_VARIANTS:
        shutil.rmtree(GOLDEN / variant, ignore_errors=True)
        model, tokens = build(variant), random_tokens(seed=7)
        states, normed, logits = reference(model, torch.tensor(tokens))
        folder = GOLDEN / variant
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        arrays = {
            "tokens": tokens.astype(np.int32),
            "positions": kept.astype(np.int32),
            "states": np.ascontiguousarray(states[:, kept]),
            "normed": np.ascontiguousarray(normed[kept]),
            "logits": np.ascontiguousarray(logits[kept]),
            "greedy": np.array(greedy(model, tokens[:8].tolist(), 24), np.int32),
        }
        made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
        save_file(arrays, folder / "reference.safetensors", metadata=made_with)


if __name__ == "__main__":
    main()
