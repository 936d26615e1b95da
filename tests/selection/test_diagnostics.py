"""Diagnostics on planted structure and against literal references."""

from dataclasses import replace
from itertools import combinations

import literal
import numpy as np
import problems
import pytest

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection import (
    CkaFloor,
    Decomposition,
    LayerGain,
    LayerPart,
    MarginalGains,
    SelectionSettings,
    SensitivityRow,
    SensitivityTable,
    beam_overlap,
    cka_floor,
    decompose,
    diagnose,
    elsi,
    elsi_c,
    exhaustive,
    marginal_gains,
    select,
    sensitivity,
    settings_of,
    sink_dominance,
)
from layerwave.selection.diagnostics import MOST_SETS
from tests.pools import calibration_of

N, B, D = 8, 10, 12


@pytest.fixture(scope="module")
def calibration():
    return Calibration.from_states(problems.states(5, N, B, D))  # growing norms


@pytest.fixture(scope="module")
def identical():
    return Calibration.from_states(np.repeat(problems.states(0, 1, B, D), N, axis=0))


# Decomposition and gains


def test_parts_are_those_of_the_literal_layers(calibration):
    layers = (1, 4, 6)
    found = decompose(calibration, [6, 1, 4])
    states = calibration.states.astype(np.float64)
    energies = np.array([np.sum(states[layer] ** 2) for layer in layers])
    w = energies / energies.sum()
    entropies = [literal.entropy(states, [layer]) for layer in layers]
    assert found.layers == layers
    np.testing.assert_allclose([part.weight for part in found.parts], w, rtol=1e-12)
    np.testing.assert_allclose([part.entropy for part in found.parts], entropies, rtol=1e-10)
    assert found.score == pytest.approx(literal.entropy(states, layers), rel=1e-10)
    assert found.informativeness + found.diversity == pytest.approx(found.score, rel=1e-12)
    assert found.bound == pytest.approx(np.dot(w, entropies) - np.dot(w, np.log(w)), rel=1e-10)


@pytest.mark.parametrize("seed", range(len(problems.KINDS)))
@pytest.mark.parametrize("weighting", ["raw", "trace"])
def test_diversity_lies_between_nothing_and_the_entropy_of_the_weights(seed, weighting):
    found = decompose(Calibration.from_states(problems.states(seed, N, B, D)), [0, 3, 7], weighting=weighting)
    assert -1e-12 <= found.diversity <= found.max_diversity + 1e-12
    if weighting == "trace":
        assert found.max_diversity == pytest.approx(np.log(3))


def test_identical_layers_have_no_diversity(identical):
    found = decompose(identical, [0, 3, 7])
    assert found.diversity == pytest.approx(0, abs=1e-12)
    assert found.score == pytest.approx(found.parts[0].entropy)


def test_layers_of_disjoint_tokens_have_all_of_it():
    states = np.random.default_rng(0).normal(size=(3, B, D))
    for layer, rows in enumerate(np.split(np.arange(B), [2, 6])):
        states[layer, np.setdiff1d(np.arange(B), rows)] = 0
    found = decompose(Calibration.from_states(states), [0, 1, 2])
    assert found.diversity == pytest.approx(found.max_diversity, rel=1e-12)
    assert found.score == pytest.approx(found.bound, rel=1e-12)


def test_a_set_that_is_none_is_refused(calibration):
    with pytest.raises(LayerwaveError, match="layer 8 is out of range"):
        decompose(calibration, [1, 8])


@pytest.mark.parametrize("method", [elsi, elsi_c])
def test_gains_against_literal_scores(calibration, method):
    chosen = method(calibration, 3, beam=4)
    found = marginal_gains(calibration, chosen)
    states = calibration.states.astype(np.float64)
    for step in found.without:
        rest = [layer for layer in chosen.layers if layer != step.layer]
        assert step.score == pytest.approx(literal.entropy(states, rest), rel=1e-9)
        assert step.gain == pytest.approx(chosen.score - literal.entropy(states, rest), abs=1e-9)
    assert sum(step.gain for step in found.path) == pytest.approx(chosen.score, rel=1e-12)
    for size in (1, 2, 3):
        prefix = tuple(sorted(step.layer for step in found.path[:size]))
        assert prefix in [layers for layers, _ in chosen.beams[size - 1]]
        assert found.path[size - 1].score == pytest.approx(literal.entropy(states, prefix), rel=1e-9)


def test_methods_without_a_beam_have_no_path(calibration):
    for method in ("exhaustive", "eagle3"):
        chosen = select(calibration, SelectionSettings(method, 3))
        found = marginal_gains(calibration, chosen)
        assert found.path == ()
        assert [step.layer for step in found.without] == list(chosen.layers)


def test_gains_are_of_the_criterion_that_selected(calibration):
    found = marginal_gains(calibration, elsi(calibration, 2, criterion="coding_rate"))
    assert found.criterion == "coding_rate"
    assert min(step.gain for step in found.without) > 0  # it is monotone; the entropy is not
    single = marginal_gains(calibration, elsi(calibration, 1))
    assert single.without[0].gain == single.path[0].gain == single.score
    with pytest.raises(LayerwaveError, match="unknown criterion 'depth'"):
        marginal_gains(calibration, replace(elsi(calibration, 2), criterion="depth"))


@pytest.mark.parametrize(
    ("gain", "path", "text"),
    [
        (0.25, (), "Layer 4 matters least: without it the entropy of [1, 4] falls by 0.250 from 2.000."),
        (-0.25, (), "Layer 4 matters least: without it the entropy of [1, 4] rises by 0.250 from 2.000."),
        (0.0, (4, 1), "falls by 0.000 from 2.000; the beam added the layers in the order [4, 1]."),
    ],
)
def test_what_gains_say(gain, path, text):
    without = (LayerGain(1, 1.0, 1.0), LayerGain(4, 2.0 - gain, gain))
    steps = tuple(LayerGain(layer, 1.0, 1.0) for layer in path)
    assert MarginalGains("entropy", (1, 4), 2.0, without, steps).reading.endswith(text)


def test_what_a_decomposition_says():
    found = Decomposition((LayerPart(1, 0.25, 2.0), LayerPart(4, 0.75, 1.0)), 1.5)
    assert (found.informativeness, found.diversity) == (1.25, 0.25)
    assert found.max_diversity == pytest.approx(np.log(4) - 0.75 * np.log(3))
    assert "Of the 1.500 nats of [1, 4], 1.250 are the layers' own and 0.250 (of 0.562 possible)" in found.reading
    assert found.reading.endswith("layer 4 carries 75% of the weight.")


# Overlap


def test_identical_layers_overlap_with_every_rule(identical):
    found = beam_overlap(identical, elsi(identical, 3, beam=2))
    assert {rule.rule for rule in found.rules} == {"eagle3", "eagle3_engine", "dflash", "uniform"}
    for rule in found.rules:
        assert (rule.share, rule.place.percentile, rule.place.rank) == (1.0, 100.0, 1)


def test_ranks_and_held_layers_against_an_enumeration(calibration):
    chosen = elsi(calibration, 3, beam=3)
    found = beam_overlap(calibration, chosen)
    states = calibration.states.astype(np.float64)
    every = {layers: literal.entropy(states, layers) for layers in combinations(range(N), 3)}
    frontier = [layers for layers, _ in chosen.beams[-1]]
    covered = set().union(*frontier)
    assert found.covered == tuple(sorted(covered))
    assert found.chance == len(covered) / N
    for rule in found.rules:
        mine = every[rule.place.layers]
        above = sum(score > mine + 1e-11 for score in every.values())
        assert rule.place.rank == above + 1
        assert rule.place.percentile == pytest.approx(100 * (len(every) - above - 1) / (len(every) - 1))
        assert rule.held == tuple(layer for layer in rule.place.layers if layer in covered)
        assert rule.frontier_rank == (frontier.index(rule.place.layers) + 1 if rule.place.layers in frontier else None)


def test_a_rule_that_the_beam_chose_ranks_first():
    states = np.ones((N, B, D)) / 10
    for place, layer in enumerate((2, 4, 5)):  # eagle3 of 8 layers: the others are constant
        states[layer] = np.eye(B, D, k=place)
    calibration = Calibration.from_states(states)
    found = {rule.rule: rule for rule in beam_overlap(calibration, elsi(calibration, 3, beam=1)).rules}
    assert (found["eagle3"].place.rank, found["eagle3"].frontier_rank, found["eagle3"].share) == (1, 1, 1.0)
    assert found["eagle3_engine"].held == (4,)  # (1, 3, 4)
    assert found["eagle3_engine"].frontier_rank is None


def test_what_an_overlap_says(calibration):
    chosen = elsi(calibration, 3, beam=1)
    found = beam_overlap(calibration, chosen)
    assert (found.frontier, found.chance) == (1, 3 / 8)
    best = max(found.rules, key=lambda rule: rule.place.percentile)
    assert best.place.percentile > min(rule.place.percentile for rule in found.rules)
    assert f"best fixed rule, {best.rule}, stands at percentile {best.place.percentile:.1f} of 56" in found.reading
    held = f"the last beam (1 sets) holds {best.share:.0%} of its layers, and would hold 38% of a random set's."
    assert found.reading.endswith(held)
    for rule in found.rules:
        assert rule.share == len(set(rule.place.layers) & set(chosen.layers)) / 3
        assert rule.reading.endswith(f"the search's last beam holds {len(rule.held)} of its 3 layers.")
    assert replace(found, rules=()).reading == "No fixed rule of this size fits the target."


def test_rules_that_do_not_fit_are_reported():
    shallow = Calibration.from_states(problems.states(0, 4, B, D))
    found = beam_overlap(shallow, elsi(shallow, 3))
    assert [rule.rule for rule in found.rules] == ["uniform"]
    assert len(found.unfit) == 3
    assert any("eagle3 = [2, N//2, N-3]" in reason for reason in found.unfit)


def test_overlap_refuses_what_does_not_belong_together(calibration, identical):
    chosen = elsi(calibration, 2)
    with pytest.raises(LayerwaveError, match="of 8 layers and the calibration of 3"):
        beam_overlap(Calibration.from_states(problems.states(0, 3)), chosen)
    with pytest.raises(LayerwaveError, match="kept no beam"):
        beam_overlap(calibration, replace(chosen, beams=(), parents=()))


# Sinks


def pools(seed=0):
    """Four pools of unlike states; those that keep sinks have one in row 0 of layers 2 to 4."""
    states = np.random.default_rng(seed).normal(size=(4, N, B, D))
    states[[0, 2], 2:5, 0] *= 60
    return states


def test_a_planted_sink_is_named():
    calibration = calibration_of(pools())
    found = sink_dominance(calibration, SelectionSettings(size=2))
    assert [(at.layer, at.position) for at in found.dominant] == [(2, 0), (3, 0), (4, 0)]
    assert found.warning
    energy = np.sum(calibration.states.astype(np.float64) ** 2, axis=2)
    np.testing.assert_allclose(found.positions, energy / energy.sum(axis=1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(found.layers, energy.sum(axis=1) / energy.sum(), rtol=1e-12)
    # Beside it the selection without sinks, which is that of the pool without them.
    assert found.keep == elsi(calibration, 2)
    assert found.drop.layers == elsi(Calibration.from_states(calibration.pool(sinks="drop")), 2).layers
    assert not set(found.keep.layers) & {2, 3, 4}
    assert found.reading.startswith("WARNING: Block position 0 holds")
    assert ", and 3 of 8 layers are ruled by one position; " in found.reading
    choices = f"the selection is {list(found.keep.layers)} with sinks and {list(found.drop.layers)} without."
    assert found.reading.endswith(choices)
    alike = sink_dominance(calibration_of(np.repeat(pools()[1:2], 4, axis=0)), SelectionSettings(size=2))
    assert alike.reading.endswith(f"; with and without sinks the selection is {list(alike.keep.layers)}.")


def test_even_states_give_no_warning():
    even = calibration_of(pools(), sinks="drop")
    found = sink_dominance(even, SelectionSettings(size=2))
    assert (found.warning, found.dominant, found.dominant_layer) == (False, (), None)
    assert found.drop == elsi(even, 2)
    assert found.keep.layers == elsi(Calibration.from_states(even.pool(sinks="keep")), 2).layers
    assert sink_dominance(even, SelectionSettings(size=2), threshold=0.01).warning


def test_a_layer_that_outweighs_the_rest_is_named():
    states = problems.states(0, N, B, D)
    states[6] *= 30
    found = sink_dominance(Calibration.from_states(states), SelectionSettings(size=2))
    assert found.dominant_layer == 6
    assert found.warning
    assert "layer 6 holds" in found.reading


def test_half_of_a_trace_does_not_dominate():
    """More than half does: rows of lengths 2, 1, 1, 1 hold 4/7 in the first."""
    lengths = np.array([[2, 2, 0, 0], [2, 1, 1, 1], [1, 0, 0, 0]])
    states = lengths[:, :, None] * np.eye(4)
    found = sink_dominance(Calibration.from_states(states[:2]), SelectionSettings(size=2))
    assert [(at.layer, at.position, at.share) for at in found.dominant] == [(1, 0, 4 / 7)]
    said = (
        "WARNING: Block position 0 holds 57% of the trace of layer 1, and 1 of 2 layers are ruled by one position; "
        "layer 0 holds 53% of all traces; "
    )
    assert found.reading.startswith(said)
    assert found.dominant_layer == 0  # 8 of 15
    equal = Calibration.from_states(np.stack([states[0], np.eye(4), np.eye(4)]))
    found = sink_dominance(equal, SelectionSettings(size=2))
    assert found.layers.tolist() == [0.5, 0.25, 0.25]
    assert (found.dominant, found.dominant_layer, found.warning) == ((), None, False)
    assert found.reading.startswith("Block position 0 holds 50% of the trace of layer 0; ")
    for wrong in (0.0, 1.0, np.nan):
        with pytest.raises(LayerwaveError, match=f"threshold is {wrong}"):
            sink_dominance(equal, SelectionSettings(size=2), threshold=wrong)


def test_a_missing_pool_is_said():
    given = sink_dominance(Calibration.from_states(pools()[0]), SelectionSettings(size=2))
    assert given.drop is None
    assert "calibrate a target" in given.missing
    emptied = sink_dominance(calibration_of(pools(), empty=(1,)), SelectionSettings(size=2))
    assert emptied.drop is None
    assert "filtered/drop holds no block" in emptied.missing
    assert emptied.missing in emptied.reading
    with pytest.raises(LayerwaveError, match=r"threshold is 1\.5"):
        sink_dominance(Calibration.from_states(pools()[0]), SelectionSettings(size=2), threshold=1.5)


# Sensitivity

SETTINGS = SelectionSettings(size=2)


def test_every_row_is_the_selection_from_its_own_pool():
    pre, post = calibration_of(pools()), calibration_of(pools(1), final_state="post_norm")
    found = sensitivity([pre, post], SETTINGS, alphas=(1, 2))
    assert len(found.rows) == 2 * 2 * 2 * 3 * 2
    assert len(found.measured) == 2 * 2 * 2 * 2 * 2
    assert found.baseline == next(
        row
        for row in found.rows
        if row.combination == {"final_state": "pre_norm", "sinks": "keep", "weighting": "raw", "rho": 0.3, "alpha": 1.0}
    )
    assert found.baseline.layers == elsi(pre, 2).layers
    for row in found.measured:
        states = {"pre_norm": pre, "post_norm": post}[row.final_state].pool(filtered=row.rho < 1, sinks=row.sinks)
        assert row.layers == elsi(Calibration.from_states(states), 2, alpha=row.alpha, weighting=row.weighting).layers
    assert sum(count for _, count in found.sets) == len(found.measured)
    assert found.agreement == dict(found.sets)[found.baseline.layers] / len(found.measured)


def test_rows_that_were_not_measured_say_what_to_run():
    found = sensitivity([calibration_of(pools())], SETTINGS, alphas=(1,))
    missing = {row.missing for row in found.rows if row.layers is None}
    assert missing == set(found.needs)
    assert missing == {
        "calibrate with final_state=pre_norm, rho=0.1",
        "calibrate with final_state=post_norm, rho=0.1",
        "calibrate with final_state=post_norm, rho=0.3",
        "calibrate with final_state=post_norm",
    }
    assert all((row.layers is None) == (row.score is None) == bool(row.missing) for row in found.rows)
    filled = sensitivity([calibration_of(pools()), calibration_of(pools(2), rho=0.1)], SETTINGS, alphas=(1,))
    assert len(filled.measured) == len(found.measured) + 4
    assert not any("pre_norm" in need for need in filled.needs)


def test_the_factor_that_changes_the_set_is_named():
    # Layers 0 and 1 hold the ten tokens between them, but are small beside the copies of six tokens.
    tokens = np.eye(B, D)
    states = np.stack([0.001 * tokens * (np.arange(B) < 5)[:, None], 0.1 * tokens * (np.arange(B) >= 5)[:, None]])
    states = np.concatenate([states, np.repeat((tokens * (np.arange(B) < 6)[:, None])[None], N - 2, axis=0)])
    found = sensitivity([calibration_of(np.repeat(states[None], 4, axis=0))], SETTINGS, alphas=(1,))
    assert found.baseline.layers == (1, 2)
    assert {row.layers for row in found.measured if row.weighting == "trace"} == {(0, 1)}
    assert found.changed_by == ("weighting",)
    assert found.agreement == 0.5


def test_what_a_sensitivity_says():
    def row(rho, weighting, layers):
        score, missing = (None, "calibrate") if layers is None else (1.0, "")
        return SensitivityRow("pre_norm", "keep", weighting, rho, 1.0, layers, score, missing)

    rows = [row(0.3, "raw", (1, 2)), row(1.0, "trace", (0, 2)), row(0.3, "trace", (1, 2)), row(0.1, "raw", None)]
    table = SensitivityTable(tuple(rows), rows[0], "elsi", 2)
    assert table.sets == (((1, 2), 2), ((0, 2), 1))
    assert table.reading == (
        "67% of 3 measured combinations select [1, 2] as the baseline does (2 different sets; changed by no factor "
        "alone); 1 combinations need another pass."
    )
    changed = SensitivityTable((*rows[:3], row(1.0, "raw", (0, 1))), rows[0], "elsi", 2)
    assert changed.changed_by == ("rho",)
    assert changed.reading.endswith("(3 different sets; changed by rho alone).")


def test_given_states_vary_in_weighting_and_alpha_alone(calibration):
    found = sensitivity([calibration], replace(SETTINGS, alpha=3.0))
    assert len(found.rows) == len(found.measured) == 2 * 4
    assert {row.alpha for row in found.rows} == {0.5, 1.0, 2.0, 3.0}
    assert (found.baseline.alpha, found.baseline.rho, found.needs) == (3.0, None, ())


def test_calibrations_that_differ_in_more_than_settings_are_refused(calibration):
    first = calibration_of(pools())
    with pytest.raises(LayerwaveError, match="differ in data_fingerprint"):
        sensitivity([first, calibration_of(pools(), data=2)], SETTINGS)
    with pytest.raises(LayerwaveError, match=r"differ in sink_multiple \(10.0 and 5.0\)"):
        sensitivity([first, calibration_of(pools(), sink_multiple=5.0)], SETTINGS)
    with pytest.raises(LayerwaveError, match="given states cannot be compared"):
        sensitivity([first, calibration], SETTINGS)
    with pytest.raises(LayerwaveError, match="no calibration"):
        sensitivity([], SETTINGS)


# CKA floor


@pytest.fixture(scope="module")
def groups():
    """Layers 0-2 are one representation with noise, 3-5 another, independent one; few tokens of many features."""
    rng = np.random.default_rng(0)
    sources = rng.normal(size=(2, 16, 200))
    return Calibration.from_states(sources[[0, 0, 0, 1, 1, 1]] + rng.normal(size=(6, 16, 200)))


def test_the_floor_tells_relation_from_few_tokens(groups):
    found = cka_floor(groups)
    within = np.array([[i // 3 == j // 3 for j in range(6)] for i in range(6)]) & ~np.eye(6, dtype=bool)
    between = np.array([[i // 3 != j // 3 for j in range(6)] for i in range(6)])
    assert found.biased[between].min() > 0.8  # what fools people
    assert (found.biased[within] > found.biased_floor[within]).all()
    assert (found.debiased[within] > found.debiased_floor[within]).all()
    assert (found.debiased[between] < found.debiased_floor[between]).mean() > 0.7
    assert found.related >= 6 / 15
    assert np.isnan(np.diagonal(found.biased_floor)).all()
    assert not found.saturated


def test_the_floor_against_literal_shuffles(groups):
    found = cka_floor(groups, permutations=20, quantile=0.5, seed=4)
    states = groups.states.astype(np.float64)
    orders = np.random.default_rng(4).permuted(np.broadcast_to(np.arange(16), (20, 6, 16)), axis=2)
    shuffled = [[X[order] for X, order in zip(states, row, strict=True)] for row in orders]
    off = ~np.eye(6, dtype=bool)
    for name, estimator in (("biased", literal.biased_cka), ("debiased", literal.debiased_cka)):
        np.testing.assert_allclose(getattr(found, name), estimator(states), rtol=1e-8)
        median = np.median([estimator(X) for X in shuffled], axis=0)
        np.testing.assert_allclose(getattr(found, f"{name}_floor")[off], median[off], rtol=1e-8, atol=1e-12)


def test_the_seed_decides_the_floor(groups):
    once, again, other = (cka_floor(groups, permutations=20, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(once.debiased_floor, again.debiased_floor)
    assert not np.array_equal(once.debiased_floor, other.debiased_floor, equal_nan=True)


def floor_of(biased, debiased, biased_floor=0.5, debiased_floor=0.25):
    """Three layers whose pairs 01, 02, 12 have these values."""

    def table(pairs, diagonal):
        M = np.full((3, 3), diagonal)
        M[np.triu_indices(3, 1)] = pairs
        return np.where(np.tri(3, k=-1), M.T, M)

    floors = (table([floor] * 3, np.nan) for floor in (biased_floor, debiased_floor))
    return CkaFloor(table(biased, 1.0), table(debiased, 1.0), *floors, quantile=0.95, permutations=20, seed=0)


def test_what_a_floor_says():
    found = floor_of([0.9, 0.6, 0.7], [0.25, 0.26, -0.1])
    assert found.spread == pytest.approx(0.4)
    assert found.related == 1 / 3  # at the floor is not above it
    assert found.reading == (
        "Pairs of layers have a median CKA of 0.70 where unrelated ones would reach 0.50; debiased it is 0.25, and 33% "
        "of the pairs lie above their floor."
    )
    for apart, saturated in ((0.9e-6, True), (1.1e-6, False)):
        assert floor_of([1, 1 - apart, 1], [0.3] * 3).saturated is saturated


def test_saturation_is_warned_of(identical):
    states = identical.states * np.geomspace(1, 9, N, dtype=np.float32)[:, None, None]
    found = cka_floor(Calibration.from_states(states), permutations=20)
    assert found.saturated
    assert found.reading.startswith("WARNING: the matrix is saturated")


def test_options_of_the_floor_are_checked(groups):
    with pytest.raises(LayerwaveError, match="permutations is 19"):
        cka_floor(groups, permutations=19)
    for wrong in (0.0, 1.0, np.nan):
        with pytest.raises(LayerwaveError, match=f"quantile is {wrong}"):
            cka_floor(groups, quantile=wrong)
    with pytest.raises(LayerwaveError, match="at least 2 layers"):
        cka_floor(Calibration.from_states(groups.states[:1]))
    assert cka_floor(Calibration.from_states(groups.states[2:4]), permutations=20).biased.shape == (2, 2)
    with pytest.raises(LayerwaveError, match="debiased estimator on 3 tokens"):
        cka_floor(Calibration.from_states(groups.states[:, :3]))


# All together


def test_a_selection_is_diagnosed_in_one_call():
    calibration, other = calibration_of(pools()), calibration_of(pools(2), rho=0.1)
    chosen = elsi(calibration, 2, beam=5, expand=4)
    found = diagnose(calibration, chosen, [other])
    assert found.gains == marginal_gains(calibration, chosen)
    assert found.sinks.keep == chosen
    assert found.sensitivity == sensitivity([calibration, other], settings_of(chosen))
    assert found.warnings["Sinks and norms"] == found.sinks.reading
    assert ("Sensitivity" in found.warnings) == bool(found.sensitivity.changed_by)
    ((part, why),) = found.missing
    assert part == "Stability"
    assert "no bootstrap replicates" in why
    assert len(found.readings) == 6
    for reading in found.readings.values():
        assert reading.endswith(".")
        assert "\n" not in reading


@pytest.mark.parametrize(("most", "ranked"), [(28, True), (27, False)])
def test_more_sets_than_can_be_ranked_at_once_are_left_to_the_user(calibration, monkeypatch, most, ranked):
    monkeypatch.setitem(MOST_SETS, "entropy", most)  # of 8 layers there are 28 pairs
    found = diagnose(calibration, elsi(calibration, 2))
    assert (found.overlap is not None) == ranked
    why = dict(found.missing).get("Fixed rules", "")
    assert ("28 sets of this size are too many to rank by entropy" in why) != ranked


@pytest.mark.parametrize("method", ["elsi", "elsi_c", "exhaustive", "low_entropy", "uniform"])
def test_settings_run_a_selection_again(calibration, method):
    settings = SelectionSettings(method, 2, beam=3, expand=4, pool=2, alpha=2.0, weighting="trace", criterion="entropy")
    chosen = select(calibration, settings)
    assert select(calibration, settings_of(chosen)) == chosen
    assert exhaustive(calibration, 2, alpha=2.0, weighting="trace").score >= chosen.score
