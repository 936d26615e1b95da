"""What is drawn is what was measured: data read back from the figures against literal numpy, on planted answers."""

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.report.figures import (
    beam_tree,
    cka_filter_heatmaps,
    cka_heatmap,
    depth_parts,
    pair_heatmap,
    prompt_curves,
    prompt_variance,
    save_figure,
    target_curves,
    variance_over_prompts,
)
from layerwave.report.figures.style import BLACK, BLUE, COLUMN, VERMILION
from layerwave.selection import Selection, elsi

N, NO_BLOCK = 9, 4


def entropy(*layers):
    """S_1 of concatenated matrices, by singular values."""
    p = np.linalg.svd(np.concatenate(layers, axis=1).astype(np.float64), compute_uv=False) ** 2
    p = p[p > 0] / p.sum()
    return -(p * np.log(p)).sum()


def linear_cka(states):
    centred = states.astype(np.float64) - states.mean(axis=1, keepdims=True, dtype=np.float64)
    cross = np.array([[np.linalg.norm(x.T @ y) ** 2 for y in centred] for x in centred])
    return cross / np.sqrt(np.outer(np.diag(cross), np.diag(cross)))


def line_of(axes, colour):
    (line,) = (line for line in axes.lines if to_hex(line.get_color()) == colour.lower() and len(line.get_xdata()))
    return line


@pytest.fixture(scope="module")
def selection(planted):
    return elsi(planted, size=3, beam=5, expand=4)


@pytest.fixture(scope="module")
def figures(planted, selection):
    return {
        "prompt_curves": prompt_curves(planted),
        "target_curves": target_curves([planted, Calibration.from_states(planted.states[:5], name="_a$b_$")]),
        "pair_heatmap": pair_heatmap(planted),
        "prompt_variance": prompt_variance(planted),
        "cka_heatmap": cka_heatmap(planted),
        "cka_filter_heatmaps": cka_filter_heatmaps(planted),
        "beam_tree": beam_tree(selection),
    }


def test_prompt_curves(planted, figures):
    axes = figures["prompt_curves"].axes[0]
    (lines,) = (artist for artist in axes.collections if isinstance(artist, LineCollection))
    drawn = np.array(lines.get_segments())
    expected = np.delete(planted.curves[0], NO_BLOCK, axis=0)
    np.testing.assert_array_equal(drawn[:, :, 1], expected)
    np.testing.assert_array_equal(drawn[:, :, 0], np.tile(np.arange(N), (len(expected), 1)))
    np.testing.assert_allclose(line_of(axes, BLUE).get_ydata(), np.median(expected, axis=0))
    np.testing.assert_allclose(line_of(axes, BLACK).get_ydata(), [entropy(z) for z in planted.states], rtol=1e-5)


def test_target_curves(planted, figures):
    axes = figures["target_curves"].axes[0]
    expected = [entropy(z) for z in planted.states]
    np.testing.assert_allclose(line_of(axes, BLACK).get_ydata(), expected, rtol=1e-5)
    np.testing.assert_allclose(line_of(axes, VERMILION).get_ydata(), expected[:5], rtol=1e-5)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["9 layers: planted", r"5 layers: _a\$b_\$"]


def test_pair_heatmap(planted, figures):
    axes = figures["pair_heatmap"].axes[0]
    states = planted.states
    seeds = sorted(range(N), key=lambda l: -entropy(states[l]))
    expected = np.array([[np.nan if i == j else entropy(states[i], states[j]) for j in range(N)] for i in seeds])
    drawn = axes.images[0].get_array()
    np.testing.assert_allclose(drawn.filled(np.nan), expected, rtol=1e-6)
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(seed) for seed in seeds]
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), np.nanargmax(expected, axis=1))


def test_prompt_variance_and_the_cut_of_each_part(planted, figures):
    axes = figures["prompt_variance"].axes[0]
    both = np.delete(planted.curves.astype(np.float64), NO_BLOCK, axis=1)
    np.testing.assert_allclose(line_of(axes, BLUE).get_ydata(), both[2].var(axis=0, ddof=1), rtol=1e-6)
    dots = next(line for line in axes.lines if line.get_marker() == "o")
    np.testing.assert_allclose(dots.get_ydata(), both[0].var(axis=0, ddof=1), rtol=1e-6)
    assert [text.get_text() for text in axes.texts] == ["early\n-50 %", "middle\n-75 %", "late\n-0 %"]
    found = variance_over_prompts(planted)
    assert found.prompts == 5
    np.testing.assert_allclose([cut for _, _, cut in found.parts], [50, 75, 0], atol=1e-3)
    assert "-75.0 % (middle, layers 2-6)" in found.reading


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        (36, [range(7), range(7, 29), range(29, 36)]),  # the paper's split of Qwen3-4B
        (32, [range(6), range(6, 26), range(26, 32)]),
        (3, [range(1), range(1, 2), range(2, 3)]),
    ],
)
def test_depth_parts(layers, parts):
    assert list(depth_parts(layers).values()) == parts


def boundaries(axes):
    """Where dashed lines cross the horizontal axis of a heat map, and the vertical one."""
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    across = {float(line.get_xdata()[0]) for line in dashed if len(set(line.get_xdata())) == 1}
    up = {float(line.get_ydata()[0]) for line in dashed if len(set(line.get_ydata())) == 1}
    return across, up


def test_cka_heatmap_finds_the_planted_compartments(planted, figures):
    axes = figures["cka_heatmap"].axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), linear_cka(planted.states), rtol=1e-9)
    assert boundaries(axes) == ({2.5, 5.5}, {2.5, 5.5})
    assert axes.get_title() == "transitions at b = 3, 6"
    assert axes.images[0].origin == "lower"


def test_cka_with_and_without_the_filter(planted, figures):
    with_filter, without = figures["cka_filter_heatmaps"].axes[:2]
    expected = linear_cka(planted.states), linear_cka(planted.pool(filtered=False))
    for axes, matrix, ends in ((with_filter, expected[0], {2.5, 5.5}), (without, expected[1], {3.5})):
        np.testing.assert_allclose(axes.images[0].get_array(), matrix, rtol=1e-9)
        assert boundaries(axes)[0] == ends
        assert axes.images[0].get_clim() == (min(m.min() for m in expected), 1)


def test_beam_tree(selection, figures):
    axes = figures["beam_tree"].axes[0]
    thin, thick, points = axes.collections
    nodes = [(depth, place) for depth, beam in enumerate(selection.beams) for place in range(len(beam))]
    np.testing.assert_array_equal(points.get_offsets(), [(depth, place + 1) for depth, place in nodes])
    np.testing.assert_array_equal(points.get_array(), [selection.beams[d][p][1] for d, p in nodes])
    labels = [text.get_text() for text in axes.texts]
    assert labels == [",".join(map(str, selection.beams[d][p][0])) for d, p in nodes]
    drawn = {
        (int(segment[0][1]) - 1, int(segment[1][0]), int(segment[1][1]) - 1)
        for lines in (thin, thick)
        for segment in lines.get_segments()
    }
    assert drawn == {(a, d, p) for d, p in nodes for a in selection.parents[d][p]}
    # The way to the chosen set: subsets of it, from a single layer on.
    bold = {text.get_text() for text in axes.texts if text.get_weight() == "bold"}
    assert ",".join(map(str, selection.layers)) in bold
    assert all({int(l) for l in label.split(",")} <= set(selection.layers) for label in bold)


def test_a_wide_beam_is_cut_and_says_so(planted):
    wide = elsi(planted, size=2, beam=30, expand=9)
    axes = beam_tree(wide).axes[0]
    assert len(axes.texts) == 9 + 20
    assert axes.get_title() == "the best 20 of 30 kept sets"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_every_figure_is_saved(figures, tmp_path, suffix):
    for name, figure in figures.items():
        save_figure(figure, tmp_path / f"{name}.{suffix}")
        start = (tmp_path / f"{name}.{suffix}").read_bytes()[:64]
        assert start.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert len(list(tmp_path.iterdir())) == len(figures)
    with pytest.raises(LayerwaveError, match="cannot be written"):
        save_figure(figure, tmp_path / "no" / f"figure.{suffix}")


def test_every_figure_is_legible_in_one_column(figures):
    for name, figure in figures.items():
        assert figure.get_figwidth() == COLUMN, name
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        axes_off_view = [t for t in texts if t.get_window_extent().width == 0]
        for text in texts:
            assert text.get_fontsize() >= 6, (name, text)
        shown = [label for axes in figure.axes for label in (axes.title, axes.xaxis.label, axes.yaxis.label)]
        for text in [text for text in shown if text.get_text()]:
            box = text.get_window_extent()
            inside = figure.bbox.padded(1)
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1, (name, text)  # noqa: PT018
            assert inside.y0 <= box.y0 and box.y1 <= inside.y1, (name, text)  # noqa: PT018
        assert any("0-based" in text.get_text() for text in texts), name
        assert not axes_off_view, name


def test_the_session_s_style_does_not_leak_in_or_out(planted):
    with matplotlib.rc_context({"font.size": 20}):
        axes = pair_heatmap(planted).axes[0]
        assert matplotlib.rcParams["font.size"] == 20
    assert axes.xaxis.label.get_fontsize() == 7
    assert {label.get_fontsize() for label in axes.get_xticklabels()} == {6.5}


def test_what_cannot_be_drawn_is_refused(planted):
    given = Calibration.from_states(planted.states)
    for draw in (prompt_curves, prompt_variance):
        with pytest.raises(LayerwaveError, match="without samples"):
            draw(given)
    with pytest.raises(LayerwaveError, match="one pool"):
        cka_filter_heatmaps(given)
    with pytest.raises(LayerwaveError, match="no calibration"):
        target_curves([])
    with pytest.raises(LayerwaveError, match="no pairs"):
        pair_heatmap(Calibration.from_states(planted.states[:1]))
    with pytest.raises(LayerwaveError, match="at least 3"):
        depth_parts(2)
    with pytest.raises(LayerwaveError, match="no beams"):
        beam_tree(Selection("elsi", (1,), 0.5, 4, "0123456789abcdef"))
