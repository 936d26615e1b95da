"""What is read of a checkpoint, and how much memory it takes on the way."""

import json
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from layerwave.targets import Decoder, DecoderConfig
from layerwave.targets.checkpoint import TensorFiles, decoder_parameters
from tests.targets.variants import GOLDEN


class Recorder:
    """A tensor that counts what is read of it."""

    def __init__(self, tensor):
        self.tensor, self.elements = tensor, 0

    def __getitem__(self, index):
        part = self.tensor[index]
        self.elements += part.size
        return part


@pytest.mark.parametrize("variant", ["qwen3", "qwen2_tied"])
def test_a_part_of_a_parameter_is_read_alone_and_is_that_of_the_whole(variant):
    folder = GOLDEN / variant
    files = TensorFiles.open(folder)
    config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
    parameters = decoder_parameters(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    for p in parameters:
        whole = p.assemble(files.slices, np.float32)
        assert whole.shape == p.whole
        tensors = {name: Recorder(files.slices(name)) for name in p.tensors}
        index = tuple(slice(size // 3, 2 * size // 3) for size in p.whole)
        part = p.assemble(tensors.__getitem__, np.float32, index)
        np.testing.assert_array_equal(part, whole[index])
        assert part.size == sum(tensor.elements for tensor in tensors.values()) > 0


LOAD = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from flax import nnx
from layerwave.targets import Decoder, DecoderConfig
from layerwave.targets.checkpoint import TensorFiles, load_decoder

def kilobytes(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])

folder = Path(sys.argv[1])
config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))  # whatever is set up once
jnp.zeros(8).block_until_ready()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = kilobytes("VmRSS")
decoder = load_decoder(config, TensorFiles.open(folder), jnp.dtype(sys.argv[2]))
kept = sum(x.nbytes for x in jax.tree.leaves(nnx.state(decoder)))
print(json.dumps({"peak": 1024 * (kilobytes("VmHWM") - before), "kept": kept}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_at_most_a_fifth_more_than_the_parameters(tmp_path, dtype):
    """Of 57 M parameters; a second copy of the largest, which stacks 16 layers, would be a fifth of them."""
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 16,
        "hidden_size": 640,
        "intermediate_size": 1120,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "vocab_size": 2000,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    decoder = nnx.eval_shape(lambda: Decoder(DecoderConfig.from_hf(config), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    shapes = {name: p.shape for p in decoder_parameters(decoder) for name in p.tensors}
    save_file({n: rng.random(shape, np.float32) for n, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path), dtype], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kept"] == sum(map(np.prod, shapes.values())) * (4 if dtype == "float32" else 2) > 1e8
    assert found["peak"] > 0.9 * found["kept"]  # the measurement sees the parameters
    assert found["peak"] <= 1.2 * found["kept"]
