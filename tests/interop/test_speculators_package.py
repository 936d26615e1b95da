"""Exported drafts in the speculators package from PyPI, and what it saves read back.

It pins other versions than we use, so it runs in an environment of its own, and only when asked:
LAYERWAVE_SPECULATORS=1 makes one (a minute or two, 1.5 GB), LAYERWAVE_SPECULATORS=/path/to/python takes that one.
"""

import json
import os
import subprocess
import venv
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.drafts import DraftVocabulary, initial_draft
from layerwave.interop import HiddenStates, export_draft, import_draft, write_speculators
from layerwave.interop.check import chain_logits
from layerwave.targets import load_target

HERE = Path(__file__).parent / "speculators"
ASKED = os.environ.get("LAYERWAVE_SPECULATORS", "")
PACKAGES = ("speculators==0.9.0", "hs-connectors==0.9.0")

pytestmark = [
    pytest.mark.speculators,
    pytest.mark.skipif(not ASKED, reason="runs in an environment of its own: set LAYERWAVE_SPECULATORS"),
]


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    if Path(ASKED).is_file():
        return ASKED
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "pip", "install", "--quiet"]
    subprocess.run([*pip, "-r", HERE / "requirements.txt"], check=True)
    subprocess.run([*pip, "--no-deps", *PACKAGES], check=True)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def mini():
    # By its path, which speculators can open: it loads the verifier's embedding, norm and head.
    return load_target(str(resources.files("layerwave") / "assets" / "mini"))


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ((1, 5, 8), {}),
        ((4, 11), {"norm_before_residual": True, "norm_before_fc": True}),
        ((0, 2, 4, 6, 10), {"fc_norm": True, "norm_output": True}),
    ],
    ids=["three", "two", "five"],
)
def test_speculators_gives_our_logits(interpreter, mini, tmp_path, layers, options):
    random = np.random.default_rng(7)
    vocabulary = DraftVocabulary.from_counts(random.permutation(mini.config.vocab_size), 1000)
    draft = initial_draft(mini, layers, vocabulary, jax.random.key(3), **options)
    for norm in (draft.module.norm, draft.module.midlayer.hidden_norm, draft.module.midlayer.input_layernorm):
        norm.scale[...] = jnp.asarray(random.uniform(0.3, 2.0, norm.scale.shape), jnp.float32)
    export_draft(draft, mini, "speculators", tmp_path / "draft", dtype="float32")

    tokens = random.integers(1, mini.config.vocab_size, 40)
    states = random.standard_normal((len(layers), 40, mini.config.hidden_size)).astype(np.float32)
    embedding = mini.decoder.embed_tokens.embedding[...]
    batch = (embedding, jnp.asarray(tokens, jnp.int32)[None], jnp.asarray(states)[:, None])
    logits = chain_logits(draft, *batch, steps=3)
    np.savez(tmp_path / "expected.npz", tokens=tokens, states=states, logits=np.asarray(logits)[:, 0])
    write_speculators(HiddenStates(tokens, states, states[-1], layers, "pre_norm"), tmp_path / "hs_0.safetensors")

    inputs = [tmp_path / name for name in ("draft", "expected.npz", "hs_0.safetensors", "saved")]
    result = subprocess.run([interpreter, HERE / "check.py", *inputs], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1])["layer_ids"] == [layer + 1 for layer in layers]

    found = import_draft(tmp_path / "saved", mini)
    assert found.config == draft.config
    np.testing.assert_array_equal(chain_logits(found, *batch, steps=3), logits)
