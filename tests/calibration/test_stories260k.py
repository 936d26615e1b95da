"""The whole calibration of a real checkpoint against torch (forward pass) and numpy in float64 (everything else)."""

import json

import numpy as np
import pytest
from literal_calibration import assert_equal, next_token_entropy

from layerwave.calibration import calibrate
from layerwave.calibration.tokens import fingerprint
from layerwave.targets import load_target

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def folder(shared_data):
    return shared_data / "stories260k"


@pytest.fixture(scope="module")
def rows(shared_data):
    """Twenty texts of real conversations of different length; the tokenizer makes about one token of two bytes."""
    conversations = json.loads((shared_data / "merged_sharegpt.json").read_text())
    words = [" ".join(turn["value"] for turn in row["conversations"]) for row in conversations]
    return [{"text": text[: 600 + 40 * i]} for i, text in enumerate([t for t in words if len(t) > 1500][:20])]


@pytest.fixture(scope="module")
def reference(folder, rows):
    """Token ids, states after each layer, final-normed last states of each text, and the head, by torch."""
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = model.model.layers
    samples = []
    for row in rows:
        ids = tokenizer(row["text"], return_tensors="pt", add_special_tokens=False).input_ids[:, :512]
        last = []
        hook = layers[-1].register_forward_hook(
            lambda *call, last=last: last.append(call[2][0] if isinstance(call[2], tuple) else call[2])
        )
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states
        hook.remove()
        # hidden[0] is the embedding, and hidden[-1] went through the final norm: the hook has the state before it.
        states = torch.stack([*hidden[1:-1], last[0]])[:, 0].numpy()
        samples.append((ids[0].numpy().astype(np.int32), states, hidden[-1][0].numpy()))
    return samples, model.lm_head.weight.detach().numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {"rho": 0.3, "block": 32},
        {"rho": 0.3, "block": 32, "sink_multiple": 1.6, "sinks": "drop"},  # so low that real positions are sinks
        {"rho": 1.0, "block": 16, "final_state": "post_norm"},
    ],
)
def test_all_four_pools_are_those_of_torch_and_numpy(folder, rows, reference, settings):
    samples, head = reference
    calibration = calibrate(load_target(folder), rows, **settings)
    literal = []
    for _, states, normed in samples:
        entropies = next_token_entropy(normed, head)
        literal.append(
            ([*states[:-1], normed] if calibration.settings.final_state == "post_norm" else states, entropies)
        )
    assert min(len(ids) for ids, _, _ in samples) >= 200
    assert_equal(calibration, [fingerprint(ids) for ids, _, _ in samples], literal, tolerance=1e-4)
    assert (calibration.sinks.sum() > 0) == ("sink_multiple" in settings)
