"""One run of many layer sets: as each alone, killed and resumed, stored and packed; and what is refused."""

import json
import logging
import os
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layerwave.calibration.tokens import fingerprints
from layerwave.drafts.checkpoint import draft_tensors, load_draft
from layerwave.drafts.examples import Example, Examples
from layerwave.drafts.loader import Rows
from layerwave.drafts.metrics import read_metrics
from layerwave.drafts.run import Run
from layerwave.drafts.settings import TrainSettings
from layerwave.drafts.stacks import Optimiser, evaluation_step, initial_stacks
from layerwave.drafts.trainer import train
from layerwave.drafts.vocabulary import DraftVocabulary
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, Target
from tests.configs import LLAMA

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, BROKEN = 48, 47
SETS = [(3,), (0, 2, 4), (1, 3, 5)]
ALONE = [(0, 2, 4)]
STEPS = 30
SETTINGS = TrainSettings(
    steps=STEPS,
    batch_size=2,
    max_length=64,
    ttt_steps=2,
    learning_rate=3e-3,
    draft_vocab_size=32,
    held_out=0.2,
    evaluate_every=15,
)


OPTIMISER = Optimiser(3e-3, 1, STEPS, 0.5, 0.0)


def make_target() -> Target:
    config = replace(LLAMA, num_layers=6, vocab_size=V, max_positions=128)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    decoder.lm_head.embedding[...] *= 3  # next-token distributions that say something
    return Target("tiny", config, decoder, None, "0123456789abcdef")


def make_examples(seed=0, number=24, mask=True) -> Examples:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, BROKEN, rng.integers(8, 30)).astype(np.int32) for _ in range(number)]
    masks = [mask & (np.arange(len(t)) >= 3) for t in tokens]
    rows = zip(tokens, masks, fingerprints(tokens), strict=True)
    return Examples(tuple(Example(t, m, f"line {i}", f) for i, (t, m, f) in enumerate(rows)), {}, V)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def run(target, tmp_path_factory) -> Path:
    """An uninterrupted run of all sets."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(target, make_examples(), SETS, SETTINGS, folder)
    return folder


@pytest.fixture(scope="module")
def alone(target, tmp_path_factory) -> Path:
    """An uninterrupted run of one of the sets."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train(target, make_examples(), ALONE, SETTINGS, folder)
    return folder


def largest_difference(a, b) -> float:
    a, b = draft_tensors(a), draft_tensors(b)
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k].astype(np.float64) - b[k].astype(np.float64)).max()) for k in a)


def timeless(lines: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def folder_of(run: Path, layers) -> Path:
    return run / "drafts" / "-".join(map(str, layers))


def test_drafts_are_written_and_read_back(target, run):
    for layers in SETS:
        draft = load_draft(folder_of(run, layers))
        assert draft.config.layers == layers
        assert draft.module.fc.kernel.shape == (16 * len(layers), 16)
        assert draft.target_fingerprint == target.fingerprint


def test_a_set_trained_with_others_is_the_set_trained_alone(target, run, alone):
    together = load_draft(folder_of(run, ALONE[0]))
    untrained = initial_stacks(target, ALONE, together.vocabulary, OPTIMISER)[2][0]
    assert largest_difference(together, untrained) > 1e-2
    # A batched product rounds otherwise than a single one: the last bit, which AdamW's first steps enlarge.
    assert largest_difference(together, load_draft(folder_of(alone, ALONE[0]))) < 1e-5


def test_every_line_of_the_metrics_stands_once(run):
    lines = read_metrics(run)
    keys = [(line["step"], tuple(line["layers"]), line["split"]) for line in lines]
    expected = {(s, layers, "train") for s in range(1, STEPS + 1) for layers in SETS}
    expected |= {(s, layers, "held_out") for s in (15, 30, STEPS) for layers in SETS}
    assert len(keys) == len(set(keys))
    assert set(keys) == expected
    for line in lines:
        assert len(line["losses"]) == len(line["accuracy"]) == len(line["acceptance"]) == SETTINGS.ttt_steps
        assert 1 <= line["tau_greedy"] <= 3
        if line["split"] == "train":
            weighted = sum(loss * 0.8**i for i, loss in enumerate(line["losses"]))
            assert line["loss"] == pytest.approx(weighted, rel=1e-5)


def test_losses_go_down(run):
    lines = [line for line in read_metrics(run) if line["split"] == "train"]
    for layers in SETS:
        losses = [line["loss"] for line in lines if tuple(line["layers"]) == layers]
        assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


TRAIN = """
import os, signal, sys
from contextlib import closing
from dataclasses import replace
from tests.drafts.test_trainer import ALONE, SETTINGS, make_examples, make_target
from layerwave.drafts.trainer import train

folder, last = sys.argv[1], int(sys.argv[2])

def kill(step, steps, tokens):
    if step == last:  # after the metrics of step 5, and after the checkpoint of step 4
        os.kill(os.getpid(), signal.SIGKILL)

settings = replace(SETTINGS, steps=8, evaluate_every=4, checkpoint_every=2)
train(make_target(), make_examples(), ALONE, settings, folder, progress=kill, announce=print)
"""


def test_a_killed_run_resumes_to_the_very_same_parameters(tmp_path):
    """Each in a process of its own, as a user's are."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles in half the time
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(folder, last=-1):
        command = [sys.executable, "-c", TRAIN, str(folder), str(last)]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    done = run(killed, 5)
    assert done.returncode == -9, done.stderr
    assert not (killed / "drafts").exists()
    assert max(line["step"] for line in read_metrics(killed)) == 5
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lay')  # a line that the kill cut
    done = run(killed)
    assert done.returncode == 0, done.stderr
    assert f"{killed} is resumed after step 4 of 8" in done.stdout
    done = run(whole)
    assert done.returncode == 0, done.stderr
    drafts = [load_draft(folder_of(folder, ALONE[0])) for folder in (killed, whole)]
    assert largest_difference(*drafts) == 0
    assert timeless(read_metrics(killed)) == timeless(read_metrics(whole))


def test_a_finished_run_is_not_trained_again(target, run):
    before = (run / "metrics.jsonl").read_bytes()
    said = []

    def fail(*_):
        pytest.fail("a step was made")

    drafts = train(target, make_examples(), SETS, SETTINGS, run, announce=said.append, progress=fail)
    assert said == [f"{run} is finished after {STEPS} steps; nothing was trained"]
    assert [draft.config.layers for draft in drafts] == SETS
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_run_that_differs_is_refused_and_every_difference_named(target, run):
    other = DraftVocabulary(np.arange(32, dtype=np.int32), V)
    with pytest.raises(LayerwaveError, match=r"vocabulary fingerprint was '[0-9a-f]{64}', is '[0-9a-f]{64}'; resume"):
        train(target, make_examples(), SETS, SETTINGS, run, vocabulary=other)
    with pytest.raises(LayerwaveError, match="data fingerprint was"):
        train(target, make_examples(seed=1), SETS, SETTINGS, run)
    with pytest.raises(LayerwaveError, match=r"settings.learning_rate was 0.003, is 0.1; settings.seed was 0, is 5;"):
        train(target, make_examples(), SETS, replace(SETTINGS, learning_rate=0.1, seed=5), run)
    with pytest.raises(LayerwaveError, match="layer sets was"):
        train(target, make_examples(), SETS[:2], SETTINGS, run)
    with pytest.raises(LayerwaveError, match="target fingerprint was '0123456789abcdef', is 'f'"):
        train(replace(target, fingerprint="f"), make_examples(), SETS, SETTINGS, run)


def test_packed_rows_give_the_losses_of_padded_ones(target):
    examples = make_examples(number=7)
    vocabulary = DraftVocabulary.from_counts(examples.counts(), 32)
    stacks, states, _ = initial_stacks(target, ALONE, vocabulary, OPTIMISER)
    found = []
    for packed in (True, False):
        rows = Rows.lay(examples, 64, packed=packed)
        sums = [
            evaluation_step(
                *nnx.split(target.decoder),
                stacks,
                states,
                rows.batch(chosen),
                None,
                jnp.array(ALONE[0]),
                jnp.asarray(vocabulary.tokens),
                SETTINGS.unroll,
            )
            for chosen in rows.in_order(2)
        ]
        assert len(sums) == (1 if packed else 4)
        found.append(jax.tree.map(lambda *parts: np.sum(parts, axis=0), *sums))
    assert found[0][0].loss.min() > 0
    assert found[0][0].asked[0, 0] == sum(row.loss_mask[2:].sum() for row in examples)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), *found)


def test_what_a_kill_left_of_checkpoints_is_cleared(tmp_path):
    """In the write of one, and while the oldest was removed after it."""
    tree, checkpoints = {"x": jnp.arange(3.0)}, tmp_path / "run" / "checkpoints"
    with closing(Run.open(tmp_path / "run", {})) as run:
        for step in (2, 4):
            run.save(step, tree)
    shutil.copytree(checkpoints / "4", checkpoints / "10.orbax-checkpoint-tmp")
    shutil.copytree(checkpoints / "4", checkpoints / "10")
    (checkpoints / "2" / "_CHECKPOINT_METADATA").unlink()
    with closing(Run.open(tmp_path / "run", {})) as run:
        assert run.step == 10
        assert {path.name for path in checkpoints.iterdir()} == {"4", "10"}
        np.testing.assert_array_equal(run.restore(tree)["x"], tree["x"])


def test_stored_states_train_the_drafts_of_the_target_in_the_loop(target, alone, tmp_path):
    said = []
    options = {"states": tmp_path / "states", "announce": said.append}
    (draft,) = train(target, make_examples(), ALONE, SETTINGS, tmp_path / "run", **options)
    assert largest_difference(draft, load_draft(folder_of(alone, ALONE[0]))) < 1e-5
    size = sum(path.stat().st_size for path in (tmp_path / "states").rglob("*.safetensors"))
    assert json.loads((tmp_path / "states" / "train" / "states.json").read_text())["dtype"] == "float32"
    assert "3 layers" in said[0]
    assert "GB of disk" in said[0]
    assert size < 1e6
    with pytest.raises(LayerwaveError, match=r"holds other states: layers was \[0, 2, 4\], is \[3\]"):
        train(target, make_examples(), [(3,)], SETTINGS, tmp_path / "other", **options)
    with pytest.raises(LayerwaveError, match="but max_disk_gb is 1e-07"):
        train(target, make_examples(), ALONE, SETTINGS, tmp_path / "third", states=tmp_path / "new", max_disk_gb=1e-7)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_loss_that_is_not_finite_stops_with_step_set_and_example(tmp_path, layout):
    target = make_target()
    embedding = target.decoder.embed_tokens.embedding
    embedding[...] = embedding[...].at[BROKEN].set(jnp.nan)
    examples = make_examples()
    rows = list(examples.rows)
    rows[9].tokens[6] = BROKEN
    settings = replace(SETTINGS, layout=layout, held_out=0.0, checkpoint_every=1)
    with pytest.raises(
        LayerwaveError, match=r"step \d: loss or gradient of the layers 0,2,4 is not .* \(from line 9\)"
    ) as e:
        train(target, examples, ALONE, settings, tmp_path / "run")
    stopped = int(str(e.value).split(":")[0].removeprefix("step "))
    saved = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()] if stopped > 1 else []
    assert max(saved, default=0) == stopped - 1


@pytest.mark.parametrize(
    ("sets", "changes", "message"),
    [
        ([], {}, "no layers to train"),
        ([(1, 2), (2, 1)], {}, "the layers 1,2 are given twice"),
        ([(6,)], {}, "layer 6 is out of range"),
        ([()], {}, "empty"),
        ([(1,)], {"batch_size": 99}, "batch_size is 99, but the data make"),
        ([(1,)], {"draft_vocab_size": V + 1}, "the target has 48 tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_a_folder_is_made(target, tmp_path, sets, changes, message):
    with pytest.raises(LayerwaveError, match=message):
        train(target, make_examples(), sets, replace(SETTINGS, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_loss_mask_is_refused(target, tmp_path):
    with pytest.raises(LayerwaveError, match="the loss mask is empty"):
        train(target, make_examples(mask=False), [(1,)], SETTINGS, tmp_path / "run")


def test_a_folder_of_something_else_is_refused(target, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(LayerwaveError, match="holds no run of `layerwave train`"):
        train(target, make_examples(), [(1,)], SETTINGS, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0.0),
        ("steps", 0),
        ("batch_size", 0),
        ("warmup", 1.0),
        ("clip", 0.0),
        ("held_out", 1.0),
        ("decay", 0.0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(LayerwaveError, match=f"^{field} is {value!r}"):
        TrainSettings(**{field: value})


def test_tensorboard_gets_every_number(target, tmp_path, caplog):
    pytest.importorskip("tensorboardX")
    caplog.set_level(logging.ERROR)
    train(target, make_examples(), ALONE, SETTINGS, tmp_path / "run", tensorboard=True)
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"held_out/tau_greedy/0-2-4" in events.read_bytes()
