"""A whole study of a tiny target: its table, the same after kills at every stage, and what is refused."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from layerwave.calibration import CalibrationSettings
from layerwave.decoding import EvaluationSettings
from layerwave.drafts.settings import TrainSettings
from layerwave.targets import Decoder, Target
from layerwave.validation import CandidateSettings, Validation, ValidationSettings, validate
from tests.decoding.test_distill import CONFIG
from tests.decoding.test_distill import make_target as make_shallow_target

NUM_LAYERS = 6
SETTINGS = ValidationSettings(
    candidates=CandidateSettings(sizes=(1, 3), random=2, acceptance_sets=2),
    seeds=2,
    calibration=CalibrationSettings(block=4, rho=0.5, replicates=2, fit_positions=60, score_positions=30),
    train=TrainSettings(steps=4, batch_size=2, max_length=64, ttt_steps=1, held_out=0.3, checkpoint_every=2),
    evaluation=EvaluationSettings(nodes=(3,), temperatures=(0.0,), max_new_tokens=6, batch=2, depth=2, top_k=2),
)


def make_target() -> Target:
    shallow = make_shallow_target()
    config = replace(CONFIG, num_layers=NUM_LAYERS)
    decoder = Decoder(config, rngs=nnx.Rngs(1))
    decoder.lm_head.embedding[...] *= 3  # next-token distributions that say something
    return replace(shallow, config=config, decoder=decoder)


def make_conversations() -> list[dict]:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc d?"), 20)) + "a" for _ in range(60)]
    return [
        {"messages": [{"role": "user", "content": f"a{ask}"}, {"role": "assistant", "content": answer}]}
        for ask, answer in zip(texts[::2], texts[1::2], strict=True)
    ]


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compilation is most of the time here; what XLA leaves out changes the last bits, everywhere."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["ab?", "c a?"]},
        {"question_id": 2, "category": "math", "turns": ["cc a?"]},
        {"question_id": 3, "category": "qa", "turns": ["a b c?"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def study(target, questions, tmp_path_factory):
    """The folder of an uninterrupted study, and its result."""
    folder = tmp_path_factory.mktemp("studies") / "whole"
    return folder, validate(target, make_conversations(), folder, SETTINGS, questions=questions)


def test_the_file_gives_everything_back(study):
    folder, found = study
    assert Validation.load(folder / "validation.json").record == found.record
