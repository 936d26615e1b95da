"""The named criteria on planted structure, and the registry."""

from itertools import combinations

import literal
import numpy as np
import problems
import pytest

from layerwave.calibration import Calibration
from layerwave.cli import main
from layerwave.errors import LayerwaveError
from layerwave.selection import (
    CRITERIA,
    Selection,
    coding_rate_criterion,
    dpp_criterion,
    elsi,
    exhaustive,
    make_criterion,
    mrmr_criterion,
)

N, B, D = 8, 10, 12
PAIRS = np.array(list(combinations(range(N), 2)))


@pytest.fixture(scope="module")
def calibration():
    return Calibration.from_states(problems.states(5, N, B, D))


@pytest.fixture(scope="module")
def groups():
    """Two independent representations: layers 0-4 are the one with a little noise, 5-7 the other."""
    rng = np.random.default_rng(0)
    sources = rng.normal(size=(2, 24, 40))
    return Calibration.from_states(sources[[0] * 5 + [1] * 3] + 0.1 * rng.normal(size=(N, 24, 40)))


def scores(calibration, name, weighting="raw", alpha=1.0):
    return make_criterion(calibration, name, alpha, weighting)[1](PAIRS)


def of_pairs(calibration, function):
    states = calibration.states.astype(np.float64)
    return [function(literal.concatenated(states, pair)) for pair in PAIRS]


def test_effective_rank_is_of_singular_values(calibration):
    def literal_rank(X):
        p = np.linalg.svd(X, compute_uv=False)
        p = p / p.sum()
        return np.exp(-np.sum(p * np.log(p)))

    np.testing.assert_allclose(scores(calibration, "effective_rank"), of_pairs(calibration, literal_rank), rtol=1e-10)


def test_participation_ratio_orders_as_the_entropy_of_order_two(calibration):
    def literal_ratio(X):
        variances = np.linalg.svd(X, compute_uv=False) ** 2
        return variances.sum() ** 2 / np.sum(variances**2)

    ratio = scores(calibration, "participation_ratio")
    np.testing.assert_allclose(ratio, of_pairs(calibration, literal_ratio), rtol=1e-10)
    np.testing.assert_array_equal(np.argsort(ratio), np.argsort(scores(calibration, "entropy", alpha=2.0)))


def test_coding_rate_has_the_scale_that_it_says(calibration):
    states = calibration.states.astype(np.float64)
    unit = np.mean(np.sum(states**2, axis=2))

    def literal_rate(X):
        return np.linalg.slogdet(np.eye(B) + D / (B * 0.2) * X @ X.T / unit)[1] / 2

    rate = coding_rate_criterion(calibration, distortion=0.2)(PAIRS)
    np.testing.assert_allclose(rate, of_pairs(calibration, literal_rate), rtol=1e-10)
    scaled = Calibration.from_states(1024 * calibration.states)
    np.testing.assert_allclose(coding_rate_criterion(scaled, distortion=0.2)(PAIRS), rate, rtol=1e-12)
    half = coding_rate_criterion(calibration, distortion=0.5)(PAIRS)
    np.testing.assert_array_equal(scores(calibration, "coding_rate"), half)
    for wrong in (0, -1.0, np.inf, np.nan):
        with pytest.raises(LayerwaveError, match=f"distortion is {wrong}"):
            coding_rate_criterion(calibration, distortion=wrong)


def test_the_most_diverse_set_has_both_groups(groups):
    for name in ("dpp", "mrmr"):
        found = exhaustive(groups, 2, criterion=name)
        assert sum(layer < 5 for layer in found.layers) == 1
    # A beam of all layers does not depend on how ties of single layers were broken.
    assert elsi(groups, 2, beam=N, criterion="dpp").layers == exhaustive(groups, 2, criterion="dpp").layers


def test_relevance_alone_stays_with_the_last_layer(groups):
    relevant = exhaustive(groups, 2, criterion=mrmr_criterion(groups, penalty=0.0))
    assert 7 in relevant.layers
    assert min(relevant.layers) >= 5
    assert elsi(groups, 1, criterion="mrmr").layers == (7,)


def test_dpp_and_mrmr_against_literal_cka(groups):
    M = literal.debiased_cka(groups.states.astype(np.float64))
    dpp = [np.linalg.slogdet(M[np.ix_(pair, pair)] + 1e-6 * np.eye(2))[1] for pair in PAIRS]
    np.testing.assert_allclose(scores(groups, "dpp"), dpp, rtol=1e-8, atol=1e-10)
    mrmr = [(M[i, -1] + M[j, -1]) / 2 - M[i, j] for i, j in PAIRS]
    np.testing.assert_allclose(scores(groups, "mrmr"), mrmr, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["dpp", "mrmr"])
def test_cka_criteria_know_no_weighting(calibration, name):
    trace = scores(calibration, name, weighting="trace", alpha=2.0)
    np.testing.assert_allclose(trace, scores(calibration, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(CRITERIA.keys() - {"acceptance"}))  # its own tests: it reads single positions
def test_rotating_features_and_permuting_tokens_changes_nothing(calibration, name):
    rng = np.random.default_rng(2)
    rotation = np.linalg.qr(rng.normal(size=(D, D)))[0]
    moved = Calibration.from_states(calibration.states[:, rng.permutation(B)].astype(np.float64) @ rotation)
    # 1e-5: the states are float32, so the rotated ones are rounded anew.
    np.testing.assert_allclose(scores(moved, name), scores(calibration, name), rtol=1e-5, atol=1e-5)


def test_copies_are_the_least_diverse_and_an_error_without_a_ridge(calibration):
    states = calibration.states.copy()
    states[3] = states[6]
    copies = Calibration.from_states(states)
    assert tuple(PAIRS[np.argmin(scores(copies, "dpp"))]) == (3, 6)
    identical = Calibration.from_states(np.repeat(states[:1], N, axis=0))
    assert np.isfinite(scores(identical, "dpp")).all()
    M = literal.debiased_cka(calibration.states.astype(np.float64))
    without_a_ridge = [np.log(1 - M[i, j] ** 2) for i, j in PAIRS]
    np.testing.assert_allclose(dpp_criterion(calibration, ridge=0)(PAIRS), without_a_ridge, rtol=1e-8, atol=1e-10)
    for wrong in (-1, np.inf, np.nan):
        with pytest.raises(LayerwaveError, match=f"ridge is {wrong}"):
            dpp_criterion(calibration, ridge=wrong)


def test_a_factory_of_the_users_own(calibration, monkeypatch):
    def depth(calibration, alpha, weighting):
        return lambda sets: alpha * sets.sum(axis=1)

    monkeypatch.setitem(CRITERIA, "depth", depth)
    found = elsi(calibration, 2, alpha=2.0, criterion="depth")
    assert (found.layers, found.score, found.criterion) == ((6, 7), 26.0, "depth")


def install(folder, value):
    """A package on the path, as pip leaves it."""
    (folder / "deepest.py").write_text("def make(calibration, alpha, weighting):\n    return lambda s: s.sum(axis=1)\n")
    info = folder / "deepest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[layerwave.criteria]\ndeepest = {value}\n")


def test_the_command_line_takes_named_and_installed_criteria(calibration, tmp_path, monkeypatch, capsys):
    install(tmp_path, "deepest:make")
    monkeypatch.syspath_prepend(tmp_path)
    calibration.save(tmp_path / "cal.safetensors")
    for name in ("coding_rate", "deepest"):
        out = tmp_path / f"{name}.json"
        main(["select", str(tmp_path / "cal.safetensors"), "--criterion", name, "--size", "2", "--out", str(out)])
        found = Selection.load(out)
        assert found.criterion == name
        assert found.layers == elsi(calibration, 2, criterion=name).layers
    assert found.layers == (6, 7)


def test_faults_of_the_registry_are_named(calibration, tmp_path, monkeypatch):
    install(tmp_path, "deepest:lost")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LayerwaveError, match="deepest = deepest:lost cannot be imported"):
        elsi(calibration, 2, criterion="deepest")
    with pytest.raises(LayerwaveError, match=r"unknown criterion 'x': choose from entropy, .*mrmr, deepest, give"):
        elsi(calibration, 2, criterion="x")


def test_a_criterion_must_give_one_score_a_set(calibration):
    def one_score(sets):
        return 1.0

    with pytest.raises(LayerwaveError, match=r"one_score gives scores of shape \(\) for 8 sets"):
        elsi(calibration, 2, criterion=one_score)
