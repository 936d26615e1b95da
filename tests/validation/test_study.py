"""A whole study of a tiny target: its table, the same after kills at every stage, and what is refused."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from layerwave.calibration import Calibration, CalibrationSettings
from layerwave.cli import main
from layerwave.decoding import Evaluation, EvaluationSettings
from layerwave.drafts.metrics import read_metrics
from layerwave.drafts.settings import TrainSettings
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, DecoderConfig, Target, load_target
from layerwave.targets.checkpoint import decoder_parameters, tensors_of
from layerwave.validation import CandidateSettings, CascadeSettings, Validation, ValidationSettings, validate
from layerwave.validation.cascade import staying
from layerwave.validation.study import Study
from tests.decoding.test_distill import VOCABULARY, make_target

NUM_LAYERS = 6
SETTINGS = ValidationSettings(
    candidates=CandidateSettings(sizes=(1, 3), random=2, acceptance_sets=2),
    seeds=2,
    calibration=CalibrationSettings(block=4, rho=0.5, replicates=2, fit_positions=60, score_positions=30),
    train=TrainSettings(steps=4, batch_size=2, max_length=64, ttt_steps=1, held_out=0.3, checkpoint_every=2),
    evaluation=EvaluationSettings(nodes=(3,), temperatures=(0.0,), max_new_tokens=6, batch=2, depth=2, top_k=2),
)


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


def write_target(folder) -> None:
    decoder = Decoder(DecoderConfig.from_hf(CONFIG), rngs=nnx.Rngs(1))
    decoder.lm_head.embedding[...] *= 3  # next-token distributions that say something
    save_file(tensors_of(decoder, decoder_parameters(decoder), np.float32), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    make_target().tokenizer.save_pretrained(folder)


def make_conversations() -> list[dict]:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc d?"), 20)) + "a" for _ in range(60)]
    return [
        {"messages": [{"role": "user", "content": f"a{ask}"}, {"role": "assistant", "content": answer}]}
        for ask, answer in zip(texts[::2], texts[1::2], strict=True)
    ]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    write_target(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    return load_target(str(target_folder))


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


STAGED = replace(
    SETTINGS,
    candidates=CandidateSettings(sizes=(1,)),
    seeds=1,
    cascade=CascadeSettings(shortlist=2, finalists=1),
)


class Killed(BaseException):
    pass


class Bar:
    """A stage's progress that dies at its n-th call."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, *_):
        self.calls -= 1
        if self.calls == 0:
            raise Killed

    steps = sets = show = __call__


def killed_in(title: str, calls: int):
    @contextmanager
    def bars(found: str):
        yield Bar(calls if found.startswith(title) else 10**9)

    return bars


def timeless(record):
    """Everything but seconds."""
    if isinstance(record, dict):
        return {key: timeless(value) for key, value in record.items() if key != "seconds"}
    return [timeless(value) for value in record] if isinstance(record, list) else record


def test_the_record_holds_what_the_stages_found(target, study, questions):
    folder, found = study
    drafts = [candidate.draft for candidate in found.candidates]
    assert {candidate.size for candidate in found.candidates} == {1, 3}
    assert sum("random" in candidate.names for candidate in found.candidates) == 2
    for seed, evaluation, held_out in zip(found.seeds, found.evaluations, found.held_out, strict=True):
        assert sorted(path.name for path in (folder / f"seed-{seed}" / "drafts").iterdir()) == sorted(drafts)
        assert [draft.name for draft in evaluation.drafts] == drafts
        assert evaluation.settings == SETTINGS.evaluation
        assert evaluation == Evaluation.load(folder / f"evaluation-{seed}.json")
        assert len(held_out) == len(drafts)
        assert all(0 < value < 1 for value in held_out)
    assert found.held_out[0] != found.held_out[1]
    assert found.calibration == Calibration.load(folder / "calibration.safetensors").fingerprint
    assert [note.split(" = ")[0] for note in found.notes] == ["the rule eagle3", "the rule eagle3_engine"]
    assert {"calibrate", "select", "train, seed 0", "evaluate, seed 1"} <= found.seconds.keys()
    assert found.settings["train"]["steps"] == 4
    assert (found.stages, found.cost) == ((), {})


def test_the_file_gives_everything_back(study):
    folder, found = study
    read = Validation.load(folder / "validation.json")
    assert read.record == found.record
    assert read.candidates == found.candidates
    assert read.evaluations == found.evaluations


def test_killed_at_every_stage_it_finds_the_same(target, questions, study, tmp_path):
    one_seed = replace(SETTINGS, seeds=1)
    for title, calls in (("calibrating", 1), ("scoring", 3), ("training", 3), ("evaluating", 1)):
        with pytest.raises(Killed):
            validate(
                target, make_conversations(), tmp_path, one_seed, questions=questions, bars=killed_in(title, calls)
            )
    bars = killed_in("training", 4)
    with pytest.raises(Killed):  # a seed more
        validate(target, make_conversations(), tmp_path, SETTINGS, questions=questions, bars=bars)
    found = validate(target, make_conversations(), tmp_path, SETTINGS, questions=questions)
    assert timeless(found.record) == timeless(study[1].record)


def test_a_finished_study_is_read_back(target, study, questions):
    folder, found = study
    again = validate(target, make_conversations(), folder, SETTINGS, questions=questions, bars=killed_in("", 1))
    assert timeless(again.record) == timeless(found.record)


def test_another_study_is_refused(target, study, questions, tmp_path):
    folder, _ = study
    conversations = make_conversations()
    other = replace(SETTINGS, train=replace(SETTINGS.train, steps=5))
    with pytest.raises(LayerwaveError, match=r"holds another run: settings\.train\.steps was 4, is 5"):
        validate(target, conversations, folder, other, questions=questions)
    with pytest.raises(LayerwaveError, match="conversations was"):
        validate(target, conversations[1:], folder, SETTINGS, questions=questions)
    with pytest.raises(LayerwaveError, match="questions was"):
        validate(target, conversations, folder, SETTINGS)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(LayerwaveError, match="holds no study of `layerwave validate`"):
        validate(target, conversations, tmp_path, SETTINGS, questions=questions)


def test_conversations_that_hold_a_question_are_left_out(target, questions, tmp_path):
    shared = {"messages": [{"role": "user", "content": "cc a?"}, {"role": "assistant", "content": "abcab abcab"}]}
    folder = tmp_path / "study"
    study = Study.open(target, [*make_conversations(), shared], folder, SETTINGS, questions, killed_in("", 1), print)
    assert len(study.conversations) == len(make_conversations())
    assert study.notes == ("1 conversations that share 13 words in a row with a question are left out",)


# The command

FLAGS = (
    "--sizes 1,3 --random 2 --acceptance-sets 2 --seeds 2 "
    "--calibration.block 4 --calibration.rho 0.5 --calibration.replicates 2 --calibration.fit-positions 60 "
    "--calibration.score-positions 30 --train.steps 4 --train.batch-size 2 --train.max-length 64 --train.ttt-steps 1 "
    "--train.learning-rate 1e-4 --train.held-out 0.3 --train.draft-vocab-size None --train.no-fc-norm "
    "--evaluation.nodes 3 --evaluation.temperatures 0 "
    "--evaluation.max-new-tokens 6 --evaluation.batch 2 --evaluation.depth 2 --evaluation.top-k 2"
).split()


@pytest.fixture
def command(target_folder, study, questions, tmp_path):
    conversations = tmp_path / "conversations.jsonl"
    conversations.write_text("".join(json.dumps(row) + "\n" for row in make_conversations()))
    files = ["--conversations", conversations, "--questions", questions, "--out", study[0]]
    return [str(arg) for arg in ("validate", target_folder, *files, *FLAGS)]


def test_the_command_prints_a_finished_study(command, study, capsys):
    """The flags say the settings of the library: otherwise the folder would be refused."""
    main(command)
    printed = capsys.readouterr()
    folder, found = study
    for candidate in found.candidates:
        layers, boundaries = (",".join(map(str, numbers)) for numbers in (candidate.layers, candidate.boundaries))
        assert re.search(rf"^ +{layers} +{boundaries} +{', '.join(candidate.names)} ", printed.out, re.MULTILINE)
    assert "note: the rule eagle3 = [2, N//2, N-3] gives [2, 3, 3] on 6 layers" in printed.out
    assert "nothing was trained" in printed.err
    assert {"criteria.png", "forest.png", "report.html", "validation.json"} <= {path.name for path in folder.iterdir()}


def test_a_dry_run_plans_and_writes_nothing(command, tmp_path, capsys):
    out = tmp_path / "study"
    command[command.index("--out") + 1] = str(out)
    main([*command, "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert not out.exists()
    assert [line.split(": ")[0] for line in lines] == ["calibrate", "select", "train", "evaluate", "disk", "time"]
    # Of 1 layer at most 4 methods, 2 rules and 2 sets of a beam, but 6 exist; of 3 layers 4, 3, 2 and 2 random ones.
    assert "17 drafts for 4 steps, 17 drafts for 4 steps; 8 target passes of 128 tokens, 136 draft-steps" in lines[2]
    assert "144 answers of up to 6 tokens" in lines[3]  # 2 seeds, 4 turns, 17 drafts and plain decoding
    assert "time: not known before the first steps are timed" in lines[5]
    main([*command, "--dry-run", "--json", "--staged", "--cascade.shortlist", "8", "--cascade.finalists", "2"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["predicted"] == 6 + 20
    assert [(one["drafts"], one["steps"]) for one in plan["trainings"]] == [(8, 1), (4, 2), (2, 4), (2, 4)]


def test_a_plan_counts_a_drafts_bytes(command, study, capsys):
    main([*command, "--dry-run", "--json"])
    plan = json.loads(capsys.readouterr().out)
    folder, found = study
    (largest,) = {(folder / "seed-0" / "drafts" / c.draft / "model.safetensors").stat().st_size
                  for c in found.candidates if c.size == 3}  # fmt: skip
    assert plan["draft_bytes"] == pytest.approx(largest, rel=0.2)  # less header, d2t and t2d
    assert plan["seconds"].keys() == found.seconds.keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes", "1,x"], "sizes '1,x' are not whole numbers between commas; write for example 1,2,3"),
        (["--layers", "1-2"], "layers '1-2' are not whole numbers between commas"),
        (["--seeds", "0"], "seeds is 0, expected at least 1"),
        (["--cascade.finalists", "20"], "finalists are 20 of a shortlist of 16"),
        (["--train.steps", "5"], "holds another run: settings.train.steps was 4, is 5"),
    ],
)
def test_the_command_refuses(command, flags, message, capsys):
    with pytest.raises(SystemExit):
        main([*command, *flags])
    assert message in capsys.readouterr().err.splitlines()[-1]


# The cascade


@pytest.fixture(scope="module")
def staged(target, questions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies") / "staged"
    return folder, validate(target, make_conversations(), folder, STAGED, questions=questions)


def test_a_cascade_ends_with_its_finalists(target, staged):
    folder, found = staged
    first, second = found.stages
    assert (first.measure, first.steps, len(first.standings)) == ("predicted acceptance", 0, NUM_LAYERS)
    assert (second.measure, second.steps, len(second.standings)) == ("held-out acceptance", 2, 2)
    assert [candidate.layers for candidate in found.candidates] == staying(second)
    assert all(candidate.names == ("cascade",) for candidate in found.candidates)
    assert found.cost["draft-steps of full runs of all sets"] == NUM_LAYERS * 4
    assert found.cost["draft-steps of the cascade"] == 2 * 2 + len(found.candidates) * 4
    assert Validation.load(folder / "validation.json").stages == found.stages


def test_acceptance_by_row_adds_up_to_the_metrics_of_the_training(staged):
    """The trainer's own evaluation, in batches, of the same drafts on the same examples."""
    folder, found = staged
    lines = [line for line in read_metrics(folder / "cascade" / "rung-1") if line["split"] == "held_out"]
    metrics = {tuple(line["layers"]): line["acceptance"][0] for line in lines}
    for standing in found.stages[1].standings:
        assert standing.value == pytest.approx(metrics[standing.layers], rel=1e-5)
    assert all(standing.standard_error > 0 for standing in found.stages[1].standings[1:])


def test_a_killed_cascade_finds_the_same(target, questions, staged, tmp_path):
    last = f"training {len(staged[1].candidates)} drafts, seed"
    for title, calls in (("predicting", 1), ("training", 1), ("comparing", 1), (last, 3), ("evaluating", 1)):
        with pytest.raises(Killed):
            validate(target, make_conversations(), tmp_path, STAGED, questions=questions, bars=killed_in(title, calls))
    found = validate(target, make_conversations(), tmp_path, STAGED, questions=questions)
    assert timeless(found.record) == timeless(staged[1].record)


# Faults


def test_a_file_that_is_no_validation_is_refused(study, tmp_path):
    path, record = tmp_path / "validation.json", study[1].record

    def refused(message, **changes):
        path.write_text(json.dumps({**record, **changes}))
        with pytest.raises(LayerwaveError, match=message):
            Validation.load(path)

    refused("is not a validation", schema="layerwave.evaluation")
    refused("has schema version 2, this layerwave reads 1: validate again", version=2)
    refused("is damaged .*do not fit together", candidates=record["candidates"][1:])
    refused("is damaged .*do not fit together", seeds=[0])
    refused("is damaged", candidates=[{"layers": [1]}])
    refused(r"is damaged .*lacks \[\] and has the unknown \['more'\]", more=1)
    refused("is damaged .*evaluations is 3, expected a list", evaluations=3)
    refused("is not an evaluation", evaluations=[{}, {}])
    for name in ("evaluations", "stages"):
        path.write_text(json.dumps({key: value for key, value in record.items() if key != name}))
        with pytest.raises(LayerwaveError, match=rf"is damaged .*lacks \['{name}'\]"):
            Validation.load(path)
    path.write_text("{")
    with pytest.raises(LayerwaveError, match="cannot be read"):
        Validation.load(path)


def test_settings_that_are_refused():
    with pytest.raises(LayerwaveError, match="seeds is 0"):
        ValidationSettings(seeds=0)
    with pytest.raises(LayerwaveError, match="a cascade compares drafts on held-out examples, but held_out is 0"):
        replace(STAGED, train=replace(STAGED.train, held_out=0.0))
