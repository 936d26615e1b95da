"""The benchmark's functions on tiny problems: equal results, honest ratios. No time is asserted."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from layerwave.bench import (
    Answer,
    Bar,
    Line,
    Peer,
    Side,
    Spread,
    Timing,
    conditional_similarity,
    entropy_of_triples,
    pairwise_similarity,
    random_states,
    searches,
    tables,
    take_turns,
)
from layerwave.bench.literal import cka_by_pairs, conditional_by_grams, conditional_by_pairs, entropy_by_svd
from layerwave.bench.memory import peak_growth
from layerwave.cli import main
from layerwave.errors import LayerwaveError
from layerwave.kernels import cka, conditional_cka, gram, matrix_entropy

SHAPE = {"layers": 8, "rows": 8, "features": 16, "repetitions": 2}


@pytest.fixture(scope="module")
def states():
    return random_states(5, 8, 16).astype(np.float64)


def test_sides_take_turns_and_their_first_calls_stand_apart():
    calls = []
    timings = take_turns([Side("a", lambda: calls.append("a")), Side("b", lambda: calls.append("b"))], 3)
    assert calls == ["a", "b"] * 4
    assert [len(timing.seconds) for timing in timings] == [3, 3]


def test_a_part_of_the_work_is_extrapolated():
    (timing,) = take_turns([Side("half", lambda: sum(range(10_000)), share=1e-6)], 1)
    assert timing.seconds[0] > 1e5 * timing.first


def test_ratios_are_taken_repetition_by_repetition():
    slow, fast = Timing("slow", 9.0, (4.0, 6.0, 20.0)), Timing("fast", 9.0, (2.0, 1.0, 4.0))
    assert slow.times(fast) == Spread(5.0, 2.0, 6.0)


@pytest.mark.parametrize(
    ("sense", "limit", "holds"),
    [("at least", 2, True), ("at least", 3, False), ("at most", 2, True), ("at most", 1, False)],
)
def test_a_bar_holds_by_its_median(sense, limit, holds):
    assert Bar("faster", Spread(2.0, 0.5, 9.0), sense, limit, "x").holds is holds


def test_exponent_of_a_power_law():
    timings = tuple(Timing("", 0.0, (3 * n**2.5,)) for n in (2, 4, 8))
    assert Line("", "", (2, 4, 8), timings).exponent == pytest.approx(2.5)


def test_literal_ways_are_the_definitions(states):
    layers = np.array([0, 3])
    joined = np.concatenate([states[0], states[3]], axis=1)
    for vectors in (False, True):
        assert entropy_by_svd(states, layers, vectors=vectors) == pytest.approx(
            float(matrix_entropy(gram(joined))), abs=1e-12
        )
    np.testing.assert_allclose(cka_by_pairs(states), cka(states), atol=1e-12)
    expected = conditional_cka(states, layers[None])[0]
    np.testing.assert_allclose(conditional_by_grams(states, layers), expected, atol=1e-12)
    pairs = np.array([[1, 2], [0, 4], [3, 3]])
    np.testing.assert_allclose(conditional_by_pairs(states, layers, pairs), expected[tuple(pairs.T)], atol=1e-12)


def test_peak_growth_sees_what_is_allocated():
    grown = peak_growth(lambda: np.ones(8_000_000).sum())
    assert grown is None or 50 < grown < 200


def test_questions_compare_what_they_measure():
    wrong = Peer("a wrong one", "biased", lambda states: cka(states) + 1e-3, 1e-6)
    with pytest.raises(LayerwaveError, match=r"a wrong one: CKA differs by 1\.0e-03 from layerwave's"):
        pairwise_similarity(**SHAPE, peers=[wrong])


def test_peers_stand_beside_the_loops():
    """The fastest peer is compared with the estimator that it computes."""
    right = Peer("another", "debiased", lambda states: cka(states, "debiased"), 1e-12)
    answer = pairwise_similarity(**SHAPE, peers=[right])
    claims = [bar.claim for bar in answer.bars]
    assert claims == ["the fastest peer, another", "loops over pairs", "debiased against biased"]
    by_name = {timing.name: timing for timing in answer.timings}
    debiased, peer = by_name["layerwave, debiased"], by_name["another, debiased"]
    assert answer.bars[0].measured == peer.times(debiased)


@pytest.mark.parametrize(
    ("ask", "options", "part"),
    [
        (entropy_of_triples, {"many_layers": 9, "literal_sets": 7}, ("literal: concatenate, thin SVD", 7 / 56)),
        (
            conditional_similarity,
            {"beam": 3, "literal_pairs": 4},
            ("literal: concatenate for every pair", 4 / (3 * 64)),
        ),
        (searches, {"problems": 5, "alone": 2}, ("5 ELSI problems one by one, from Grams", 2 / 5)),
    ],
)
def test_a_question_says_which_part_was_done(ask, options, part):
    answer = ask(**SHAPE, **options)
    assert part in [(timing.name, timing.share) for timing in answer.timings]
    assert all(len(timing.seconds) == 2 for timing in answer.timings)
    assert len(tables.bar_rows(answer)) == len(answer.bars) > 0


def test_command_prints_every_question(capsys):
    main(["bench", "--layers", "8", "--rows", "8", "--features", "16", "--repetitions", "1", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [answer["question"][0] for answer in printed["answers"]] == list("12345")
    assert printed["machine"]["versions"]["jax"]
    assert all(np.isfinite(line["exponent"]) for line in printed["answers"][4]["lines"])


def test_command_refuses_a_shape_that_it_cannot_measure(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--layers", "3"])
    assert "layers is 3: the benchmark needs at least 8" in capsys.readouterr().err


@pytest.fixture
def scripts(monkeypatch):
    """The folder of the scripts, where the checkout has it."""
    folder = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("harness", "peers", "run_all"):
        sys.modules.pop(name, None)


def test_page_has_bars_of_models_from_what_their_scripts_wrote(scripts):
    import run_all

    text = '{"round": 1}\n{\n "speed ratios": [\n  1.2,\n  1.4,\n  0.9\n ],\n "peak ratio": 0.8\n}\n'
    answer = run_all.of_models({"calibration": run_all.last_json(text)})
    assert [(bar.measured, bar.holds) for bar in answer.bars] == [
        (Spread(1.2, 0.9, 1.4), True),
        (Spread(0.8, 0.8, 0.8), False),
    ]


def test_an_answer_is_read_from_its_json(scripts):
    import run_all

    answer = Answer("0. What", "a size", bars=(Bar("a claim", Spread(1.0, 0.5, 2.0), "at most", 1.5, "s", "why"),))
    assert run_all.answer_of(json.loads(json.dumps(tables.record(answer)))) == answer


@pytest.mark.parametrize("number", range(5))
def test_packages_give_layerwaves_values(scripts, number):
    for package in ("torch", "cka", "ckatorch", "torch_cka"):
        pytest.importorskip(package, reason="peers: pip install -r benchmarks/requirements.txt")
    from peers import peers

    peer, states = peers()[number], random_states(6, 16, 24)
    np.testing.assert_allclose(peer.run(states), cka(states, peer.estimator), rtol=0, atol=peer.tolerance)
