"""The memory that is planned against what XLA allocates and what is there; what does not fit is refused."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from layerwave.calibration import CalibrationSettings, plan
from layerwave.calibration.plan import plan_calibration
from layerwave.calibration.step import Sums, batch_step
from layerwave.calibration.tokens import SMALLEST_BUCKET
from layerwave.cli import main
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, DecoderConfig

CONFIG = DecoderConfig.from_hf(
    {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "num_hidden_layers": 12,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
)


@pytest.mark.parametrize(("b", "T"), [(4, 512), (1, 2048)])
def test_planned_activations_are_about_what_xla_allocates(b, T):
    settings = CalibrationSettings(max_length=T)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))))
    shape = jax.ShapeDtypeStruct
    sums = Sums(*(shape((12, number, 32, 256), jnp.float32) for number in (4, 35)))
    static = {"rho": 0.3, "post_norm": False, "sink_multiple": 10.0, "dtype": jnp.float32}

    def allocated(b, T):
        arguments = shape((b, T), jnp.int32), shape((b,), jnp.int32), shape((35, b), jnp.float32), 0
        arguments = *arguments, shape((2, 64), jnp.int32), None
        compiled = batch_step.lower(graphdef, params, sums, *arguments, **static).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # The plan covers the batches of the longest and of the shortest samples.
    measured = max(allocated(b, T), allocated(b * T // SMALLEST_BUCKET, SMALLEST_BUCKET))
    planned = plan_calibration(CONFIG, "float32", settings, batch_tokens=b * T)
    assert 0.8 < planned.activations / measured < 1.4
    assert planned.pools + planned.replicates == sum(x.size * 4 for x in sums)
    assert planned.parameters == sum(x.size * 4 for x in jax.tree.leaves(params))


def test_the_batch_is_halved_until_it_fits_and_refused_with_numbers_where_none_does(monkeypatch):
    settings = CalibrationSettings(max_length=256)
    free = {"device": 10**12}
    monkeypatch.setattr(plan, "free_memory", lambda mesh: (free["device"], 10**12))
    whole = plan_calibration(CONFIG, "float32", settings)
    assert whole.batch_tokens == 2048
    free["device"] = whole.device - 1
    half = plan_calibration(CONFIG, "float32", settings)
    assert half.batch_tokens == 1024
    assert half.device <= free["device"]
    with pytest.raises(LayerwaveError, match=r"does not fit .* 2,048 tokens a batch"):
        plan_calibration(CONFIG, "float32", settings, batch_tokens=2048)
    free["device"] = 40_000_000
    with pytest.raises(
        LayerwaveError,
        match=r"memory: one device, 256 tokens a batch: \d+ MB on each device, of 40 MB free",
    ):
        plan_calibration(CONFIG, "float32", settings)


def test_a_host_without_room_for_the_token_sample_is_refused(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda mesh: (10**12, 100_000_000))
    assert plan_calibration(CONFIG, "float32", CalibrationSettings(token_sample=False)).token_sample == 0
    with pytest.raises(LayerwaveError, match=r"on the host, of 100 MB free \(token sample 52 MB\)"):
        plan_calibration(CONFIG, "float32", CalibrationSettings())


def test_the_command_prints_its_plan_and_refuses_before_it_loads(tmp_path, capsys):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "one"}\n')
    command = ["calibrate", "mini", str(data), "--out", str(tmp_path / "out.safetensors")]
    with pytest.raises(SystemExit):
        main([*command, "--batch-tokens", "10000000000"])
    assert "does not fit into memory: one device, 10,000,000,000 tokens a batch" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command)
    said = capsys.readouterr().err
    assert said.startswith("plan: one device, 2,048 tokens a batch:")
    assert "shorter than a block" in said


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2000 kB\n"}, 2_048_000),
        (
            {
                "proc/meminfo": "MemAvailable: 2000 kB\n",
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.stat": "anon 5\n",
            },
            2_048_000,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 2000 kB\n",
                "sys/fs/cgroup/memory.max": "1500000\n",
                "sys/fs/cgroup/memory.stat": "anon 400000\nfile 7\n",
            },
            1_100_000,
        ),
    ],
)
def test_free_memory_of_the_host_is_what_the_container_leaves(tmp_path, files, free):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert plan._host_memory(tmp_path) == free
