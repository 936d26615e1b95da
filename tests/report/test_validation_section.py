"""A validation in figures and in the report: what was measured is what is drawn and said, and nothing gets out."""

import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from page import Page

from layerwave import cli
from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.report import report_html
from layerwave.report.figures.style import COLUMN, GREEN, VERMILION
from layerwave.report.figures.validation import (
    accepted_by_criteria,
    accepted_by_other_criteria,
    cascade_funnel,
    criteria_forest,
    names_of,
)
from layerwave.report.validation import validation_section
from layerwave.selection import elsi
from layerwave.validation.report_card import report_cards, scores_of
from tests.validations import NAMES, SETS, planted_validation

EVIL = "</title><script>alert(1)</script>\"'><img src=x onerror=alert(2)>$\\frac$ _&"


@pytest.fixture(scope="module")
def tiny():
    """The least that a report can be made of: what is looked at here does not depend on it."""
    return Calibration.from_states(np.random.default_rng(0).normal(size=(4, 4, 6)).astype(np.float32))


@pytest.fixture(scope="module")
def validation(tiny):
    return replace(planted_validation(nodes=(60,)), calibration=tiny.fingerprint)


@pytest.fixture(scope="module")
def card(validation):
    return report_cards(validation)[0]


@pytest.fixture(scope="module")
def figures(validation, card):
    return {
        "scatter": accepted_by_criteria(validation, card),
        "others": accepted_by_other_criteria(validation, card),
        "forest": criteria_forest(card),
        "funnel": cascade_funnel(validation.stages, names_of(validation)),
    }


@pytest.fixture(scope="module")
def page(tiny, validation, tmp_path_factory):
    """By the command line, from files."""
    folder = tmp_path_factory.mktemp("validation")
    paths = [str(folder / name) for name in ("cal.safetensors", "validation.json", "report.html")]
    tiny.save(paths[0])
    validation.save(paths[1])
    cli.main(["report", paths[0], "--validation", paths[1], "--out", paths[2]])
    return Page((folder / "report.html").read_text())


def points_of(axes):
    """All points that are drawn as markers, by colour."""
    return {to_hex(line.get_color()): line.get_xydata() for line in axes.lines if line.get_marker() not in ("None", "")}


def test_the_scatter_shows_every_set_with_its_interval(validation, card, figures):
    scores = scores_of(validation)
    for axes, name in zip(figures["scatter"].axes, ("entropy", "acceptance"), strict=True):
        drawn = np.concatenate(list(points_of(axes).values()))
        expected = np.array([(x, tau.value) for x, tau in zip(scores[name], card.apart, strict=True)])
        np.testing.assert_allclose(drawn[np.lexsort(drawn.T)], expected[np.lexsort(expected.T)])
        assert len(points_of(axes)) == 3  # sizes by colour
        bars = {tuple(ends[:, 1]) for lines in axes.collections for ends in np.array(lines.get_segments())}
        assert bars == {(tau.low, tau.high) for tau in card.apart}
        assert {text.get_text() for text in axes.texts} == {", ".join(names) for names in NAMES.values()}
        assert f"{card['all sets'][name].spearman.value:.2f}" in axes.get_title()


def test_labels_do_not_lie_on_each_other(figures):
    for axes in (*figures["scatter"].axes, *figures["funnel"].axes):
        boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines to their points
        shared = sum(a.padded(-1).overlaps(b.padded(-1)) for i, a in enumerate(boxes) for b in boxes[:i])
        assert shared <= 1


def test_small_multiples_show_the_other_scores(validation, figures):
    titles = [axes.get_title().split("\n")[0] for axes in figures["others"].axes if axes.get_visible()]
    assert titles == [name for name in scores_of(validation) if name not in ("entropy", "acceptance")]


def test_the_forest_shows_values_and_both_intervals(card, figures):
    for axes, group in zip(figures["forest"].axes, ("all sets", "within sizes"), strict=True):
        names = [label.get_text() for label in figures["forest"].axes[0].get_yticklabels()]
        for height, name in enumerate(names):
            own = card[group][name.removesuffix(" (raw S₁)")]
            lines = [line for line in axes.lines if len(set(line.get_ydata())) == 1 and line.get_ydata()[0] == height]
            drawn = [tuple(line.get_xdata()) for line in lines if line.get_xdata()[0] is not None]
            found = own.spearman
            expected = [found.over_measurements, found.over_sets, (found.value,)]
            assert [ends for ends in expected if ends] == drawn
            colour = {"better": GREEN, "worse": VERMILION}.get(own.verdict)
            if colour:
                assert to_hex(lines[-1].get_color()) == colour.lower()
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert dashed[0].get_xdata()[0] == card[group].ceiling
        assert names[-1] in ("acceptance", "held-out acceptance")


def test_a_criterion_without_a_correlation_says_why(card):
    alone = replace(card, groups=tuple(replace(g, name="all sets") for g in card.groups if g.name == "1 layer"))
    (axes,) = criteria_forest(alone).axes
    assert "all sets score alike" in [text.get_text() for text in axes.texts]


def test_the_funnel_shows_who_left_when(validation, figures):
    (axes,) = figures["funnel"].axes
    for place, stage in enumerate(validation.stages):
        left = next(line for line in axes.lines if line.get_marker() == "x" and set(line.get_xdata()) == {place})
        assert len(left.get_ydata()) == sum(not found.stays for found in stage.standings)
    labels = {text.get_text() for text in axes.texts}
    finalists = [found.layers for found in validation.stages[-1].standings if found.stays]
    bold = {text.get_text() for text in axes.texts if text.get_weight() == "bold"}
    assert {label.split(" ")[0] for label in bold} == {",".join(map(str, layers)) for layers in finalists}
    last = {found.layers for stage in validation.stages[:-1] for found in stage.standings if not found.stays}
    for layers, names in NAMES.items():
        assert (layers in last) <= (f"{','.join(map(str, layers))} {', '.join(names)}" in labels)
    with pytest.raises(LayerwaveError, match="no cascade"):
        cascade_funnel(())


def test_the_figures_are_legible_in_two_columns(figures):
    for name, figure in figures.items():
        assert figure.get_figwidth() == 2 * COLUMN, name
        figure.draw_without_rendering()
        for text in (text for text in figure.findobj(Text) if text.get_visible() and text.get_text()):
            assert text.get_fontsize() >= 6, (name, text)
        inside = figure.bbox.padded(1)
        for axes in figure.axes:
            for text in (axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts):
                if text.get_text() and axes.get_visible():
                    box = text.get_window_extent()
                    assert inside.x0 <= box.x0 and box.x1 <= inside.x1, (name, text)  # noqa: PT018
                    assert inside.y0 <= box.y0 and box.y1 <= inside.y1, (name, text)  # noqa: PT018


def test_the_section_says_and_shows_it(page, validation, card):
    start = page.text.index("Does the criterion predict acceptance?\n")
    assert page.text.index("Predicted acceptance\n") < start < page.text.index("Figures\n")
    assert "Drafts of 17 layer sets of planted" in page.text
    assert card.reading in page.text
    assert all(f"Note: {note}." in page.text for note in card.notes)
    assert {"href": "#validation"} in page.attributes["a"]
    names = [svg["aria-label"] for svg in page.attributes["svg"]]
    assert sum("60 nodes, temperature 0" in name for name in names) == 3
    assert sum(name.startswith("The cascade") for name in names) == 1
    rows = page.tables["Layer sets and accepted lengths τ, 60 nodes, temperature 0"]
    assert [row[0] for row in rows[1:]] == [",".join(map(str, layers)) for layers in SETS]
    assert rows[1][rows[0].index("τ AVG")] == f"{card.tau[0].value:.4f}"
    assert rows[1][rows[0].index("minus the mean")] == f"{card.apart[0].value:.4f}"
    best = ",".join(map(str, SETS[card["all sets"].best]))
    caption = next(name for name in page.tables if name.startswith("Report card, all sets"))
    assert f"best set found {best}; noise ceiling" in caption
    table = {row[0]: row for row in page.tables[caption]}
    columns = table["criterion"]
    assert table["acceptance"][columns.index("beside S_1")] == "better"
    assert table["entropy"][1] == f"{card['all sets']['entropy'].spearman.value:.4f}"
    assert table["a random set"][columns.index("regret")] == f"{card['all sets'].chance.value:.4f}"
    groups = [name.split(", ")[1] for name in page.tables if name.startswith("Report card")]
    assert groups == ["all sets", "within sizes", "1 layer", "2 layers", "3 layers"]
    cascade = page.tables["The cascade: where each set was compared last"][1:]
    assert sorted(row[0] for row in cascade) == sorted(",".join(map(str, layers)) for layers in SETS)
    assert cascade[0][3] == "stays"
    assert cascade[-1][1:4] == ["1. predicted acceptance", "17", "left"]
    assert dict(page.tables["Cost of the cascade"][1:]) == {"trained": "1700", "full": "5100"}
    assert dict(page.tables["Settings of the validation"][1:])["seeds of the trainings"] == "0,1,2"


def test_ids_stay_unique_and_nothing_comes_from_outside(page):
    every = [attributes for tag in page.attributes.values() for attributes in tag]
    ids = [attributes["id"] for attributes in every if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in every:
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
        for url in re.findall(r"url\(([^)]*)\)", " ".join(filter(None, attributes.values()))):
            assert url.startswith("#")
    assert len(page.scripts) == 1


def test_text_of_the_validation_is_escaped(tiny, validation):
    first = replace(validation.candidates[0], names=(EVIL,))
    scores = [dict(candidate.scores) | {EVIL: 1.0} for candidate in validation.candidates]
    candidates = [
        replace(candidate, scores=own)
        for candidate, own in zip((first, *validation.candidates[1:]), scores, strict=True)
    ]
    stages = [replace(stage, measure=EVIL) for stage in validation.stages]
    evil = replace(
        validation, target=EVIL, notes=(EVIL,), settings={EVIL: {EVIL: EVIL}}, candidates=tuple(candidates),
        stages=tuple(stages), cost={EVIL: 1}, seconds={EVIL: 1.0},
    )  # fmt: skip
    text = report_html(tiny, [elsi(tiny, 2)], evil)
    page = Page(text)
    assert len(page.scripts) == 1
    assert "img" not in page.attributes
    assert "alert(1)</script>" not in text
    assert f"Note: {EVIL}" in page.text


def test_one_seed_without_a_cascade(tiny, validation):
    alone = replace(
        validation, seeds=validation.seeds[:1], evaluations=validation.evaluations[:1], held_out=(), stages=(), cost={}
    )
    section = validation_section(alone)
    assert any("one seed" in note for note in section.notes)
    assert not any("cascade" in table.caption for table in section.tables)
    assert len(section.pictures) == 3


def test_a_validation_of_another_calibration_is_refused(tiny):
    with pytest.raises(LayerwaveError, match="the validation scored its layer sets with the calibration 89ab"):
        report_html(tiny, (), planted_validation(nodes=(60,)))
