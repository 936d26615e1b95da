"""The token sample: its draw, what stands in it, its formats, and that parts make the whole."""

import logging
import math
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_target
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from layerwave.calibration import Calibration, CalibrationSettings, TokenSample, calibrate, read_conversations
from layerwave.calibration.token_draw import draw_positions
from layerwave.calibration.token_gather import projection_matrix, token_format
from layerwave.calibration.tokens import encode, fingerprint
from layerwave.errors import LayerwaveError

FIT, SCORE = 60, 30
SETTINGS = {
    "block": 16,
    "sink_multiple": 3.0,
    "max_length": 128,
    "replicates": 0,
    "fit_positions": FIT,
    "score_positions": SCORE,
    "batch_tokens": 512,  # so that 4, 8 and 12 rows make batches of one shape
}


def texts(number):
    rng = np.random.default_rng(3)
    words = "states drift over depth while a quiz in lazy prose keeps zest".split()
    return [{"text": " ".join(rng.choice(words, 40))[: rng.choice([99, 127])]} for _ in range(number)]


ROWS = texts(12)


@pytest.fixture(scope="module")
def calibration(target):
    return calibrate(target, ROWS, **SETTINGS)


@pytest.fixture(scope="module")
def thirds(target):
    return [calibrate(target, ROWS[start::3], **SETTINGS) for start in range(3)]


@pytest.fixture(scope="module")
def unpadded(target):
    """Token ids, states of all layers and final-normed states by fingerprint, run one row at a time."""
    forward = jax.jit(lambda tokens: target.decoder(tokens)[:2])
    samples = {}
    for conversation in read_conversations(ROWS):
        ids = np.array(encode(target.tokenizer, conversation), np.int32)
        states, normed = forward(ids[None])
        samples[int(fingerprint(ids))] = ids, np.array(states[:, 0]), np.array(normed[0])
    return samples


def literal_draw(lengths, seed, fit, score):
    """[(priority, fingerprint, t)] of both sides, from the lengths by fingerprint."""
    sides = [], []
    for sample, length in lengths.items():
        words = np.random.PCG64([seed, sample, 1]).random_raw(1 + length).tolist()
        scores = words[0] / 2**64 < score / (fit + score)
        sides[scores].extend((words[1 + t - 4], sample, t) for t in range(4, length - 1))
    return sorted(sides[0])[:fit], sorted(sides[1])[:score]


def assert_drawn(tokens, sides):
    np.testing.assert_array_equal(tokens.priorities, [priority for side in sides for priority, _, _ in side])
    np.testing.assert_array_equal(tokens.samples, [sample for side in sides for _, sample, _ in side])
    np.testing.assert_array_equal(tokens.positions, [t for side in sides for _, _, t in side])
    assert tokens.fitting.tolist() == [True] * len(sides[0]) + [False] * len(sides[1])
    np.testing.assert_array_equal(tokens.scoring, ~tokens.fitting)


def assert_equal_to_rounding(ours, theirs):
    for name in ("samples", "positions", "priorities", "sinks", "top_tokens", "vocabulary", "embeddings", "head"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    for name in ("states", "normed", "log_normaliser"):
        a, b = getattr(ours, name), getattr(theirs, name)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(), err_msg=name)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_draw_is_the_literal_one(target, calibration, unpadded, seed):
    if seed:
        calibration = calibrate(target, ROWS, **SETTINGS, seed=seed)
    lengths = {sample: len(ids) for sample, (ids, _, _) in unpadded.items()}
    sides = literal_draw(lengths, seed, FIT, SCORE)
    assert (len(sides[0]), len(sides[1])) == (FIT, SCORE)
    assert_drawn(calibration.tokens, sides)


def test_no_conversation_fits_and_scores(calibration):
    tokens = calibration.tokens
    fit, score = (set(tokens.samples[side].tolist()) for side in (tokens.fitting, tokens.scoring))
    assert not fit & score
    assert fit | score == set(calibration.fingerprints.tolist())


def test_every_position_is_as_likely_as_any_other():
    rng = np.random.default_rng(0)
    fingerprints = rng.integers(0, 2**64, 1500, dtype=np.uint64)
    settings = CalibrationSettings(fit_positions=4000, score_positions=2000)
    draw = draw_positions(fingerprints, [25] * 1500, settings)
    counts = np.bincount(draw.positions, minlength=25)
    assert counts[:4].sum() == counts[24:].sum() == 0
    expected = len(draw.positions) / 20
    assert ((counts[4:24] - expected) ** 2 / expected).sum() < 52.4  # chi-square, 19 degrees: below 1e-4 to exceed
    scoring = len(set(draw.owners[-draw.scoring :].tolist())) / 1500
    assert abs(scoring - 1 / 3) < 4.5 * math.sqrt(2 / 9 / 1500) + 0.01  # some sample of a side may give no position


def literal_sinks(states, multiple):
    norms = np.linalg.norm(states.astype(np.float64), axis=-1)
    return (norms > multiple * np.median(norms, axis=1, keepdims=True)).any(axis=0)


@pytest.mark.parametrize("final_state", ["pre_norm", "post_norm"])
def test_states_and_targets_are_those_of_the_forward_pass(target, calibration, unpadded, final_state):
    if final_state == "post_norm":
        calibration = calibrate(target, ROWS, **SETTINGS, final_state=final_state)
    tokens = calibration.tokens
    embedding = np.array(target.decoder.embed_tokens.embedding[...])
    head = np.array(target.decoder.head_weight())
    scored = 0
    for q, (sample, t) in enumerate(zip(tokens.samples.tolist(), tokens.positions, strict=True)):
        ids, states, normed = unpadded[sample]
        if final_state == "post_norm":
            states = np.concatenate([states[:-1], normed[None]])
        np.testing.assert_allclose(tokens.states[:, q], states[:, t], rtol=0, atol=1e-5 * np.abs(states).max())
        np.testing.assert_array_equal(tokens.embeddings[q], embedding[ids[t + 1]])
        np.testing.assert_allclose(tokens.normed[q], normed[t + 1], rtol=0, atol=1e-5 * np.abs(normed).max())
        assert tokens.sinks[q] == literal_sinks(states, SETTINGS["sink_multiple"])[t]
        if tokens.scoring[q]:
            logits = head.astype(np.float64) @ normed[t + 1].astype(np.float64)
            np.testing.assert_array_equal(tokens.top_tokens[scored], np.argsort(-logits, kind="stable")[:8])
            assert tokens.log_normaliser[scored] == pytest.approx(math.log(np.exp(logits).sum()), abs=1e-5)
            scored += 1
    assert scored == len(tokens.top_tokens) == SCORE
    assert sorted(set(tokens.top_tokens.ravel().tolist())) == tokens.vocabulary.tolist()
    np.testing.assert_array_equal(tokens.head, head[tokens.vocabulary])
    assert tokens.states.dtype == tokens.normed.dtype == np.float32


def test_sinks_are_drawn_and_left_to_the_reader(target, calibration):
    tokens = calibration.tokens
    assert 0 < tokens.sinks.sum() < len(tokens.sinks)
    assert tokens.used("keep").all()
    np.testing.assert_array_equal(tokens.used("drop"), ~tokens.sinks)
    dropped = calibrate(target, ROWS, **SETTINGS, sinks="drop").tokens
    assert_equal_to_rounding(dropped, tokens)


def test_order_and_batches_do_not_change_the_sample(target, calibration):
    other = calibrate(target, ROWS[::-1], **SETTINGS | {"batch_tokens": 2048})
    assert_equal_to_rounding(other.tokens, calibration.tokens)


def test_parts_merged_are_the_whole(target, calibration, thirds):
    merged = Calibration.merge(thirds)
    assert_equal_to_rounding(merged.tokens, calibration.tokens)
    pair = calibrate(target, ROWS[0::3] + ROWS[1::3], **SETTINGS)
    assert_equal_to_rounding(Calibration.merge([thirds[2], pair]).tokens, calibration.tokens)
    first = thirds[2].tokens.samples
    assert not np.isin(first, pair.tokens.samples).any()


def test_fewer_positions_than_asked_are_all_taken_and_recorded(target, unpadded):
    calibration = calibrate(target, ROWS, **SETTINGS | {"fit_positions": 5000, "score_positions": 3000})
    lengths = {sample: len(ids) for sample, (ids, _, _) in unpadded.items()}
    sides = literal_draw(lengths, 0, 5000, 3000)
    assert_drawn(calibration.tokens, sides)
    assert len(sides[0]) + len(sides[1]) == sum(length - 5 for length in lengths.values())
    summary = calibration.summary
    assert summary["of 5,000 positions drawn to fit predicted acceptance"] == len(sides[0])
    assert summary["of 3,000 positions drawn to score it"] == len(sides[1])
    assert summary["attention sinks among them"] == calibration.tokens.sinks.sum()
    assert "megabytes of token sample in float32" in summary


def test_one_side_left_empty_is_a_warning_and_merges(target, calibration, unpadded, tmp_path, caplog):
    alone = {side: [] for side in ("fit", "score")}
    for row in ROWS:
        sample = int(fingerprint(np.array(encode(target.tokenizer, read_conversations([row])[0]), np.int32)))
        alone["score" if np.isin(sample, calibration.tokens.samples[-SCORE:]) else "fit"].append(row)
    parts = []
    for side, empty in (("fit", "score"), ("score", "fit")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "layerwave"):
            part = calibrate(target, alone[side], **SETTINGS)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        numbers = (FIT, 0) if empty == "score" else (0, SCORE)
        conversations = (len(alone["fit"]), 0) if empty == "score" else (0, len(alone["score"]))
        assert "{} conversations to fit predicted acceptance and {} to score it".format(*conversations) in caplog.text
        assert (int(part.tokens.fitting.sum()), int(part.tokens.scoring.sum())) == numbers
        part.save(tmp_path / "cal.safetensors")
        parts.append(Calibration.load(tmp_path / "cal.safetensors"))
    assert parts[0].tokens.vocabulary.shape == (0,)
    assert_equal_to_rounding(Calibration.merge(parts).tokens, calibration.tokens)


def test_one_conversation_on_a_side_is_a_warning(target, calibration, caplog):
    """It gives no standard error, so that nothing can be predicted from it: said before hours are spent."""
    scoring = {int(sample) for sample in calibration.tokens.samples[-SCORE:]}
    samples = [
        int(fingerprint(np.array(encode(target.tokenizer, conversation), np.int32)))
        for conversation in read_conversations(ROWS)
    ]
    one = next(place for place, sample in enumerate(samples) if sample in scoring)
    rows = [row for place, row in enumerate(ROWS) if place == one or samples[place] not in scoring]
    with caplog.at_level(logging.WARNING, "layerwave"):
        part = calibrate(target, rows, **SETTINGS)
    assert part.tokens.scoring.any()
    assert f"{len(rows) - 1} conversations to fit predicted acceptance and 1 to score it, but two" in caplog.text


def test_the_fingerprint_names_the_sample_and_its_use(calibration):
    """The states are the same in all of these; what predicted acceptance reads is not."""
    tokens = calibration.tokens
    others = [
        replace(calibration, tokens=None),
        replace(calibration, tokens=replace(tokens, states=tokens.states * np.float32(2))),
        replace(calibration, tokens=replace(tokens, samples=tokens.samples[::-1])),
        replace(calibration, tokens=replace(tokens, sinks=~tokens.sinks)),
    ]
    prints = {calibration.fingerprint, *(other.fingerprint for other in others)}
    assert len(prints) == 1 + len(others)
    assert replace(calibration).fingerprint == calibration.fingerprint


def test_switched_off(target, calibration, tmp_path):
    without = calibrate(target, ROWS, **SETTINGS, token_sample=False, token_megabytes=1e-9)
    assert without.tokens is None
    assert not [what for what in without.summary if "positions" in what or "token sample" in what]
    np.testing.assert_allclose(without.sums, calibration.sums, rtol=0, atol=1e-5 * np.abs(calibration.sums).max())
    without.save(tmp_path / "cal.safetensors")
    assert not [name for name in load_file(tmp_path / "cal.safetensors") if name.startswith("token_")]
    assert Calibration.load(tmp_path / "cal.safetensors").tokens is None


def size(form, layers, features, fit, score):
    """Bytes of states, embeddings, final-normed states and, at the most, head."""
    rows = layers * form.width + 2 * features
    return form.dtype.itemsize * ((fit + score) * rows + 8 * score * features)


@pytest.mark.parametrize(
    ("layers", "features", "megabytes", "dtype", "projected"),
    [
        (12, 192, 256.0, "float32", False),
        (24, 896, 256.0, "bfloat16", False),  # 3,072 x 26 x 896 + 8,192 x 896 numbers of 4 bytes are 316 MB
        (24, 896, 316.0, "float32", False),
        (24, 896, 315.5, "bfloat16", False),
        (36, 2560, 256.0, "bfloat16", True),
        (80, 8192, 512.0, "bfloat16", True),
    ],
)
def test_the_best_format_that_fits(layers, features, megabytes, dtype, projected):
    form = token_format(layers, features, CalibrationSettings(token_megabytes=megabytes))
    assert (form.dtype.name, form.width < features) == (dtype, projected)
    assert size(form, layers, features, 2048, 1024) <= megabytes * 1e6
    if projected:
        assert size(form._replace(width=form.width + 1), layers, features, 2048, 1024) > megabytes * 1e6


def test_a_limit_for_no_useful_width_is_refused():
    settings = CalibrationSettings(token_megabytes=86.0)
    with pytest.raises(
        LayerwaveError,
        match=r"^token_megabytes is 86, but 3072 positions of 36 layers and 2560 features take 88 at the least: raise",
    ):
        token_format(36, 2560, settings)
    assert token_format(36, 2560, replace(settings, token_megabytes=87.6)).width == 64


@pytest.fixture(scope="module")
def wide():
    """A target of 96 features, and its calibrations in every format: 4 layers x 90 positions."""
    target = make_target(features=96)
    limits = {"float32": 256.0, "bfloat16": 0.2, "projected": 0.14}
    return target, {
        name: calibrate(target, ROWS, **SETTINGS, token_megabytes=limit).tokens for name, limit in limits.items()
    }


def test_the_formats_hold_the_same_states_less_exactly(wide):
    whole, half, projected = (wide[1][name] for name in ("float32", "bfloat16", "projected"))
    for name in ("states", "embeddings", "normed", "head"):
        assert {getattr(tokens, name).dtype.name for tokens in (half, projected)} == {"bfloat16"}
    for name in ("samples", "positions", "sinks"):
        for tokens in (half, projected):
            np.testing.assert_array_equal(getattr(tokens, name), getattr(whole, name))
    for name in ("states", "embeddings", "normed"):
        exact = getattr(whole, name)
        np.testing.assert_allclose(getattr(half, name).astype(np.float32), exact, rtol=2.0**-8, atol=1e-5)
    for name in ("embeddings", "normed", "head", "top_tokens", "log_normaliser"):
        np.testing.assert_array_equal(getattr(projected, name), getattr(half, name))

    width = projected.states.shape[2]
    assert 64 <= width < 96
    matrix = np.asarray(projection_matrix(96, width, seed=0), np.float64)
    expected = whole.states.astype(np.float64) @ matrix
    error = projected.states.astype(np.float64) - expected
    assert np.abs(error).max() < 2.0**-8 * np.abs(expected).max()
    assert whole.megabytes > half.megabytes > projected.megabytes
    assert (half.megabytes, projected.megabytes) < (0.2, 0.14)


def test_probabilities_are_those_of_what_is_kept(wide):
    """In bfloat16 too, the normaliser is that of the rounded states and head: what is covered is below 1."""
    target, samples = wide
    for tokens in samples.values():
        table = np.asarray(target.decoder.head_weight().astype(tokens.head.dtype)).astype(np.float64)
        np.testing.assert_array_equal(table[tokens.vocabulary], tokens.head.astype(np.float64))
        logits = tokens.normed[tokens.scoring].astype(np.float64) @ table.T
        np.testing.assert_allclose(tokens.log_normaliser, np.log(np.exp(logits).sum(axis=1)), atol=1e-5)


def test_projected_grams_are_on_average_the_true_ones():
    rows = np.random.default_rng(0).standard_normal((5, 96)) * np.array([1, 2, 4, 8, 16])[:, None]
    true = rows @ rows.T
    W, seeds = 64, 200
    projected = [rows @ np.asarray(projection_matrix(96, W, seed), np.float64) for seed in range(seeds)]
    grams = np.stack([P @ P.T for P in projected])
    # Var (x G Gᵀ y) = (|x|² |y|² + (x·y)²) / W for independent entries of N(0, 1/W).
    squares = np.diag(true)
    deviation = np.sqrt((squares[:, None] * squares + true**2) / W)
    assert (np.abs(grams.mean(axis=0) - true) < 4.5 * deviation / math.sqrt(seeds)).all()
    np.testing.assert_allclose(grams.std(axis=0), deviation, rtol=4.5 * math.sqrt(1 / seeds))


def test_seeds_of_any_size_have_projections_of_their_own():
    first = projection_matrix(4, 3, seed=0)
    for seed in (1, 2**32, 2**40, 2**70):
        assert not np.allclose(projection_matrix(4, 3, seed), first)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "projected"])
def test_a_saved_sample_is_read_back_bit_for_bit(wide, calibration, tmp_path, name):
    tokens = wide[1][name]
    sums = np.ones((4, 4, 16, 96), np.float32)
    whole = replace(calibration, sums=sums, tokens=tokens)
    whole.save(tmp_path / "cal.safetensors")
    loaded = Calibration.load(tmp_path / "cal.safetensors").tokens
    for field in fields(TokenSample):
        ours, theirs = getattr(loaded, field.name), getattr(tokens, field.name)
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


def test_merged_formats(wide):
    target, samples = wide
    parts = [calibrate(target, ROWS[s::3], **SETTINGS, token_megabytes=0.14) for s in range(3)]
    merged, whole = Calibration.merge(parts).tokens, samples["projected"]
    np.testing.assert_array_equal(merged.positions, whole.positions)
    assert merged.states.dtype.name == "bfloat16"
    ours, theirs = merged.states.astype(np.float32), whole.states.astype(np.float32)
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-7, atol=1e-4 * np.abs(theirs).max())


def test_parts_that_do_not_belong_together(thirds):
    def changed(**changes):
        return replace(thirds[1], settings=replace(thirds[1].settings, **changes))

    with pytest.raises(LayerwaveError, match=r"calibration 1 \(counted from 0\) holds no token sample"):
        Calibration.merge([thirds[0], replace(thirds[1], tokens=None)])
    with pytest.raises(LayerwaveError, match=r"differ in fit_positions \(60 and 61\)"):
        Calibration.merge([thirds[0], changed(fit_positions=61)])
    with pytest.raises(LayerwaveError, match=r"differ in token_megabytes"):
        Calibration.merge([thirds[0], changed(token_megabytes=1.0)])
    with pytest.raises(LayerwaveError, match=r"differ in token_sample \(True and False\)"):
        Calibration.merge([thirds[0], replace(changed(token_sample=False), tokens=None)])
    assert Calibration.merge([replace(part, tokens=None) for part in thirds]).tokens is None


@pytest.mark.parametrize("part", ["norm", "lm_head"])
def test_final_norm_and_head_that_are_not_finite(part):
    target = make_target()
    weight = target.decoder.norm.scale if part == "norm" else target.decoder.lm_head.embedding
    weight[...] = weight[...].at[3].set(float("nan"))
    with pytest.raises(LayerwaveError, match=r"next-token entropies hold NaN or infinity, .* final norm and head"):
        calibrate(target, ROWS[:4], **SETTINGS)


def swap_side(arrays):
    arrays["token_samples"][-1] = arrays["token_samples"][0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a.pop("token_sinks"), "lacks token_sinks"),
        (lambda a: a.update(token_states=a["token_states"][1:]), "token_states has shape .*, expected 4 on axis N"),
        (lambda a: a.update(token_normed=a["token_normed"][:, 1:]), "token_normed has shape .*, expected 48 on axis D"),
        (lambda a: a.update(token_positions=a["token_positions"][1:]), "token_positions .*, expected 90 on axis Q"),
        (
            lambda a: a.update(token_head=a["token_head"].astype(np.float64)),
            "float64 .* float32 or bfloat16 RD",
        ),
        (lambda a: a.update(token_head=a["token_head"].astype(jnp.bfloat16)), "states are bfloat16 and float32"),
        (lambda a: a.update(token_states=np.tile(a["token_states"], 2)), "token_states has .*, wider than the model"),
        (
            lambda a: a.update(
                token_top_tokens=np.tile(a["token_top_tokens"], (4, 1)),
                token_log_normaliser=np.tile(a["token_log_normaliser"], 4),
            ),
            "token_top_tokens has 120 rows, expected at most 90",
        ),
        (lambda a: a["token_top_tokens"].fill(0), "not the ascending union"),
        (lambda a: a["token_samples"].fill(7), "names samples that fingerprints does not"),
        (swap_side, "a sample that both fits and scores"),
    ],
)
def test_damaged_samples_are_named(calibration, tmp_path, damage, message):
    path = tmp_path / "cal.safetensors"
    calibration.save(path)
    with safe_open(path, framework="numpy") as file:
        header = file.metadata()
    arrays = load_file(path)
    damage(arrays)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, header)
    with pytest.raises(LayerwaveError, match=rf"cal.safetensors is damaged .*{message}"):
        Calibration.load(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fit_positions", 0),
        ("score_positions", 0),
        ("token_megabytes", 0.0),
        ("token_megabytes", float("nan")),
    ],
)
def test_settings_out_of_range(field, value):
    with pytest.raises(LayerwaveError, match=rf"^{field} is {value!r}, but must be"):
        CalibrationSettings(**{field: value})
