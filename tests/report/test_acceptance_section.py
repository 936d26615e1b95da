"""Predicted acceptance in figures and in the report: what was measured is what is drawn and said."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from page import Page

from layerwave.errors import LayerwaveError
from layerwave.report import report_html
from layerwave.report.figures import acceptance_curve, acceptance_ladder, acceptance_learning, acceptance_pairs
from layerwave.report.figures.style import BLACK, BLUE, COLUMN, GREEN, VERMILION
from layerwave.selection import acceptance_study, elsi, learning_curve

N = 9


@pytest.fixture(scope="module")
def study(with_tokens):
    return acceptance_study(with_tokens, size=3, beam=3)


@pytest.fixture(scope="module")
def curve(study):
    return learning_curve(study.scores, study.followed)


@pytest.fixture(scope="module")
def figures(study, curve):
    drawn = {draw.__name__: draw(study) for draw in (acceptance_curve, acceptance_pairs, acceptance_ladder)}
    return drawn | {"acceptance_learning": acceptance_learning(study, curve)}


@pytest.fixture(scope="module")
def selections(with_tokens, study):
    return [elsi(with_tokens, 2, 3, criterion=study.scores), elsi(with_tokens, 2)]


@pytest.fixture(scope="module")
def page(with_tokens, selections):
    return Page(report_html(with_tokens, selections))


def bars(container):
    """Values and errors of one `errorbar`."""
    line, _, (spread,) = container.lines
    ends = np.array(spread.get_segments())[:, :, 1]
    return np.asarray(line.get_ydata(), float), (ends[:, 1] - ends[:, 0]) / 2


def test_the_curve_shows_single_layers_with_their_errors(study, figures):
    axes = figures["acceptance_curve"].axes[0]
    values, errors = bars(axes.containers[0])
    np.testing.assert_allclose(values, [s.value for s in study.singles])
    best = max(study.singles, key=lambda s: s.value)
    np.testing.assert_allclose(
        errors, [study.scores.difference(s, best).standard_error for s in study.singles], atol=1e-12
    )
    level = {to_hex(line.get_color()): line.get_ydata()[0] for line in axes.lines if len(line.get_xdata()) == 2}
    assert level[GREEN.lower()] == study.best.value
    assert level[VERMILION.lower()] == study.entropy.value


def test_the_heat_map_shows_pairs(study, figures):
    axes = figures["acceptance_pairs"].axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array().filled(np.nan), study.pairs)
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(seed) for seed in study.seeds]
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), np.nanargmax(study.pairs, axis=1))


def test_the_ladder_shows_sizes_gains_and_the_smallest(study, figures):
    upper, lower = figures["acceptance_ladder"].axes
    values, errors = bars(upper.containers[0])
    np.testing.assert_allclose(values, [rung.best.value for rung in study.ladder])
    np.testing.assert_allclose(errors, [study.behind(rung.best).standard_error for rung in study.ladder], atol=1e-12)
    ((size, value),) = [line.get_xydata()[0] for line in upper.lines if to_hex(line.get_color()) and line.get_ms() == 9]
    assert (size, value) == (len(study.smallest.layers), study.smallest.value)
    gains, errors = bars(lower.containers[0])
    np.testing.assert_allclose(gains, [rung.gain.value for rung in study.ladder[1:]])
    np.testing.assert_allclose(errors, [rung.gain.standard_error for rung in study.ladder[1:]])
    assert [text.get_text() for text in upper.texts] == [",".join(map(str, r.best.layers)) for r in study.ladder]


def test_the_learning_curve_shows_each_set(study, curve, figures):
    axes = figures["acceptance_learning"].axes[0]
    drawn = [bars(container) for container in axes.containers]
    for followed, (values, errors) in enumerate(drawn):
        np.testing.assert_allclose(values, [point.sets[followed].value for point in curve.points])
        expected = [point.behind[followed].standard_error for point in curve.points]
        np.testing.assert_allclose(errors, expected, atol=1e-12)
    colours = {
        container.get_label().partition(":")[0]: to_hex(container.lines[0].get_color()) for container in axes.containers
    }
    assert colours["best"] == GREEN.lower()
    assert colours["entropy's"] == VERMILION.lower()
    assert BLUE.lower() in colours.values() or study.smallest == study.best
    assert BLACK not in colours.values()


def test_the_figures_are_legible_in_one_column(figures):
    for name, figure in figures.items():
        assert figure.get_figwidth() == COLUMN, name
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        assert all(text.get_fontsize() >= 6 for text in texts), name
        assert any("0-based" in text.get_text() for text in texts), name
        inside = figure.bbox.padded(1)
        for axes in figure.axes:
            for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
                if text.get_text():
                    box = text.get_window_extent()
                    assert inside.x0 <= box.x0 and box.x1 <= inside.x1, (name, text)  # noqa: PT018
                    assert inside.y0 <= box.y0 and box.y1 <= inside.y1, (name, text)  # noqa: PT018


def test_what_was_not_scored_is_not_drawn(with_tokens, study, curve):
    with pytest.raises(LayerwaveError, match="only single layers"):
        acceptance_pairs(acceptance_study(with_tokens, size=1))
    with pytest.raises(LayerwaveError, match="too few"):
        acceptance_learning(study, replace(curve, points=curve.points[-1:], missing=("20 positions: too few",)))


def test_the_section_says_and_shows_it(page, selections):
    start = page.text.index("is the probability that the target accepts")
    assert page.text.index("Verdict\n") < start < page.text.index("Figures\n")
    assert "fitted on 160 positions, scored on 120 positions of 12 other conversations" in page.text
    assert sum(svg["aria-label"].startswith(("Predicted", "What one", "Fewer")) for svg in page.attributes["svg"]) == 4
    rows = page.tables["Selections and rules by predicted acceptance"]
    assert [row[0] for row in rows[1:]][:2] == ["1. acceptance, best set, smallest good set", "2. elsi, entropy's set"]
    assert rows[1][1] == "3,6"
    assert rows[1][6:] == ["–"] * 3
    assert rows[2][8] == "yes"
    assert {"dflash", "uniform"} <= {row[0] for row in rows[1:]}
    assert [row[1] for row in page.tables["The best set of each size"][1:]] == ["3", "3,6"]
    assert len(page.tables["Single layers by predicted acceptance"]) == N + 1


def test_the_verdict_on_a_selection_by_acceptance(page):
    verdict = page.text[: page.text.index("Predicted acceptance\n")]
    assert "Stable: in 100% of the resamples of 12 scoring conversations" in verdict
    assert "a trained draft is not linear" in verdict.lower()
    assert "Chosen by acceptance: acceptance = 0." in verdict
    assert "Sensitivity" in page.text[page.text.index("What is missing here") :]


def test_a_set_that_a_better_one_beats_is_warned_of(with_tokens, selections):
    text = Page(report_html(with_tokens, selections[1:])).text
    warnings = text[text.index("Warnings") : text.index("What else")]
    assert "A linear draft is predicted to do better with layers 3,6" in warnings
    assert "does not measure how many tokens" in text


def test_without_a_token_sample_the_section_says_why(planted):
    page = Page(report_html(planted))
    assert "Not measured: " in page.text
    assert "token sample" in page.text
    assert "Single layers by predicted acceptance" not in page.tables


def test_progress_is_told(with_tokens, selections):
    told = []
    report_html(with_tokens, selections[:1], progress=lambda done, about: told.append(done))
    assert told == sorted(told)
    assert told
