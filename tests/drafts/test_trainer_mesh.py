"""Drafts trained on a mesh of devices are those of one device."""

import os
import subprocess
import sys
from pathlib import Path

TRAIN = """
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from layerwave.drafts.eagle3 import initial_draft
from layerwave.drafts.metrics import read_metrics
from layerwave.drafts.trainer import train
from layerwave.errors import LayerwaveError
from layerwave.targets.checkpoint import TensorFiles, load_decoder, save_decoder
from layerwave.targets.mesh import make_mesh
from tests.drafts.test_trainer import SETTINGS, largest_difference, make_examples, make_target

folder = Path(sys.argv[1])
target, sets = make_target(), [(0, 2, 4)]
settings = replace(SETTINGS, steps=8, batch_size=4, evaluate_every=4, checkpoint_every=4, layout="padded")
save_decoder(target.decoder, folder / "model.safetensors", jnp.float32)
one = train(target, make_examples(), sets, settings, folder / "one")
untrained = [initial_draft(target, layers, one[0].vocabulary, jax.random.key(settings.seed)) for layers in sets]
for text, states in (("data=4,model=2", None), ("data=4", folder / "states")):
    mesh = make_mesh(text)
    decoder = load_decoder(target.config, TensorFiles.open(folder), jnp.dtype("float32"), mesh)
    run = folder / text

    def stop(step, steps, tokens):
        if step == 5:
            raise KeyboardInterrupt

    shared = replace(target, decoder=decoder, mesh=mesh)
    try:
        train(shared, make_examples(), sets, replace(settings, batch_size=6), run)
    except LayerwaveError as error:
        assert "batch_size is 6, but the mesh has data=4: pass a multiple of it" in str(error)
    assert not run.exists()
    try:
        train(shared, make_examples(), sets, settings, run, states=states, progress=stop)
    except KeyboardInterrupt:
        pass
    many = train(shared, make_examples(), sets, settings, run, states=states)  # goes on after step 4
    for a, b, c in zip(many, one, untrained):
        assert largest_difference(a, b) < 1e-2 * largest_difference(b, c), (text, largest_difference(a, b))
        assert len(a.module.fc.kernel[...].sharding.device_set) == mesh.size
    for a, b in zip(read_metrics(run), read_metrics(folder / "one"), strict=True):
        assert (a["step"], a["layers"], a["split"]) == (b["step"], b["layers"], b["split"])
        for name in ("losses", "accuracy", "acceptance", "tau_sampled", "predicted"):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, err_msg=f"{text} {name}")
    print(text, "agrees")
"""


def test_drafts_of_a_mesh_are_those_of_one_device(tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{text} agrees" for text in ("data=4,model=2", "data=4")]
