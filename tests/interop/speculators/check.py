"""Loads an exported draft with the speculators package and compares its logits with ours; needs no layerwave.

    python check.py DRAFT EXPECTED.npz HS.safetensors SAVED

DRAFT: directory in the format of speculators. EXPECTED: tokens (T,), states (m, T, D) of the layers in ascending order,
logits (J, T, Vd) of the first J steps. HS: a hidden-state file over the same tokens. SAVED: where to write the draft
again with save_pretrained. Prints one JSON line; exits with 1 when logits differ by more than 1e-4 of the largest.
"""

import json
import sys
from importlib.metadata import version

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.data_generation.offline import check_hidden_states
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

TOLERANCE = 1e-4


def main(draft: str, expected: str, hidden_states: str, saved: str) -> None:
    given = np.load(expected)
    tokens, states, logits = (torch.from_numpy(given[name]) for name in ("tokens", "states", "logits"))
    config = Eagle3SpeculatorConfig.from_pretrained(draft)
    config.transformer_layer_config._attn_implementation = "eager"  # the default needs a compiler
    model = Eagle3DraftModel.from_pretrained(draft, config=config, dtype=torch.float32).eval()
    never_loaded = [name for name, tensor in model.state_dict().items() if tensor.isnan().any()]

    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    joined = torch.cat(list(states), dim=-1)[None]
    # It takes tokens already shifted: slot t gets token t + 1. Beyond the end stands token 0.
    ahead = torch.nn.functional.pad(tokens[1:], (0, 1))[None]
    with torch.no_grad():
        model(joined, ahead, document_ids=torch.zeros_like(ahead), ttt_steps=len(logits))
    differences = [float((a - b).abs().max() / logits.abs().max()) for a, b in zip(seen, logits, strict=True)]

    check_hidden_states(load_file(hidden_states), tokens.tolist())
    model.save_pretrained(saved)
    print(
        json.dumps(
            {
                "versions": {name: version(name) for name in ("speculators", "transformers", "torch")},
                "layer_ids": list(model.target_layer_ids),
                "never_loaded": never_loaded,
                "largest_logit": float(logits.abs().max()),
                "differences": differences,
            }
        )
    )
    sys.exit(bool(never_loaded) or max(differences) > TOLERANCE)


if __name__ == "__main__":
    main(*sys.argv[1:])
