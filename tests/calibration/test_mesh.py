"""Eight devices, in every shape of mesh, give the calibration of one; and what a mesh refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from layerwave.errors import LayerwaveError
from layerwave.targets import make_mesh

FOLDER = Path(__file__).parent

EIGHT_DEVICES = """
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import jax
import jax.numpy as jnp
import numpy as np
from conftest import make_target
from flax import nnx

from layerwave.calibration import CalibrationSettings, calibrate
from layerwave.calibration.plan import plan_calibration
from layerwave.calibration.sharded_step import empty_sums, sharded_step
from layerwave.targets.checkpoint import TensorFiles, load_decoder, save_decoder
from layerwave.targets.mesh import make_mesh

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
folder = Path(sys.argv[2])
target = make_target(features=96)
save_decoder(target.decoder, folder / "model.safetensors", jnp.float32)
rng = np.random.default_rng(0)
rows = [{"text": "".join(rng.choice(list("the wave of zs"), rng.integers(70, 127)))} for _ in range(19)]
# 19 samples in batches of at most 8 rows: the last shares have nothing but padding.
options = dict(block=8, rho=0.4, sink_multiple=3.0, replicates=4, fit_positions=50, score_positions=30)
options |= dict(token_megabytes=0.125, batch_tokens=1024)
one = calibrate(target, rows, **options)
assert one.tokens.states.shape[2] < 96, "states are not projected"
assert (make_mesh().shape["data"], make_mesh().shape["model"]) == (8, 1)
share = {  # of the elements of the parameters, on one device
    "data=8": lambda p: 1,
    "data=4,model=2": lambda p: 1 if "norm" in p else 2,  # 4 and 2 heads, 96 hidden units, 262 tokens
    "data=2,model=4": lambda p: 4 if any(x in p for x in ("q_proj", "o_proj", "mlp")) else 1,
    "model=8": lambda p: 8 if "mlp" in p else 1,
}

def close(ours, theirs, tolerance=1e-5):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    return np.nanmax(np.abs(ours - theirs)) / np.nanmax(np.abs(theirs)) < tolerance

for text, parts in share.items():
    mesh = make_mesh(text)
    decoder = load_decoder(target.config, TensorFiles.open(folder), jnp.dtype("float32"), mesh)
    for path, parameter in nnx.to_flat_state(nnx.state(decoder)):
        held, name = parameter[...].addressable_shards[0].data.size, ".".join(map(str, path))
        assert held * parts(name) == parameter[...].size, (text, name, held)
    held = [x.addressable_shards[-1].data.nbytes for x in jax.tree.leaves(nnx.state(decoder))]
    plan = plan_calibration(target.config, "float32", CalibrationSettings(), mesh)
    assert plan.parameters == sum(held), text
    many = calibrate(replace(target, decoder=decoder, mesh=mesh), rows, **options)
    for name in ("counts", "kept", "lengths", "sinks", "fingerprints"):
        assert np.array_equal(getattr(many, name), getattr(one, name)), (text, name)
    for pool in range(4):
        for layer in range(4):
            assert close(many.sums[pool, layer], one.sums[pool, layer]), (text, pool, layer)
    assert close(many.curves, one.curves), text
    assert close(many.replicates.sums, one.replicates.sums), text
    for name in ("states", "normed", "embeddings", "head", "log_normaliser"):
        # Kept in bfloat16, whose steps are 2^-8.
        assert close(getattr(many.tokens, name), getattr(one.tokens, name), 2e-2), (text, name)
    for name in ("samples", "positions", "priorities", "sinks", "top_tokens"):
        assert np.array_equal(getattr(many.tokens, name), getattr(one.tokens, name)), (text, name)
    print(text, "agrees")

# The last mesh: nothing that runs on a CPU alone is in the step.
graphdef, params = nnx.split(decoder)
sums = empty_sums(mesh, 4, 7, 8, 96)
arguments = params, sums, jnp.zeros((8, 64), jnp.int32), jnp.zeros(8, jnp.int32), jnp.zeros((7, 8)), 0
step = jax.jit(partial(sharded_step, mesh, graphdef, rho=0.4, post_norm=True, sink_multiple=3.0, dtype=jnp.float32))
for platform in ("cuda", "tpu"):
    exported = jax.export.export(step, platforms=[platform])(*arguments, jnp.zeros((2, 8), jnp.int32), None)
    assert "callback" not in exported.mlir_module()
"""


def test_every_shape_of_mesh_gives_the_calibration_of_one_device(tmp_path):
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-c", EIGHT_DEVICES, str(FOLDER), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [
        f"{m} agrees" for m in ("data=8", "data=4,model=2", "data=2,model=4", "model=8")
    ]


@pytest.mark.parametrize("text", ["4", "data=0", "model", "data=2,data=2", "rows=2", "data=2;model=2", ""])
def test_a_mesh_that_is_not_one_is_refused(text):
    with pytest.raises(LayerwaveError, match=f"mesh is '{text}', but must be of the form data=4,model=2"):
        make_mesh(text)


def test_a_mesh_of_more_devices_than_there_are_is_refused_with_numbers():
    with pytest.raises(
        LayerwaveError, match=r"mesh data=3,model=50 needs 150 devices, but this process has \d+ \(cpu\)"
    ):
        make_mesh("data=3,model=50")
