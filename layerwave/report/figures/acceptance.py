"""Predicted acceptance: single layers, pairs, sets of growing size, and fewer positions to fit on."""

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from layerwave.errors import LayerwaveError
from layerwave.report.figures.style import (
    BLACK,
    BLUE,
    COLUMN,
    GREEN,
    GREY,
    SEQUENTIAL,
    VERMILION,
    layer_axis,
    styled,
    whole_numbers,
)
from layerwave.selection import AcceptanceStudy, Difference, LearningCurve, ScoredSet
from layerwave.selection.sets import join

LABEL = "predicted acceptance α̂"
HEIGHT = 0.72 * COLUMN


@styled
def acceptance_curve(study: AcceptanceStudy) -> Figure:
    """α̂ of every single layer; lines: the best set of the study and the entropy's.

    Bars are standard errors of the paired difference to the best single layer: α̂ itself is far less certain, but for
    all layers alike.
    """
    figure = Figure(figsize=(COLUMN, HEIGHT))
    axes = figure.subplots()
    best = max(study.singles, key=lambda scored: scored.value)
    behind = [study.scores.difference(scored, best) for scored in study.singles]
    _with_errors(axes, range(len(study.singles)), study.singles, behind, fmt="o-", color=BLACK)
    for scored, colour, style, whose in (
        (study.best, GREEN, "--", "best set"),
        (study.entropy, VERMILION, ":", "entropy's set"),
    ):
        axes.axhline(scored.value, color=colour, ls=style, label=f"{whose}: {join(scored.layers)}")
    axes.set_ylabel(LABEL)
    layer_axis(axes.xaxis)
    axes.set_xlim(-0.5, len(study.singles) - 0.5)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center")
    return figure


@styled
def acceptance_pairs(study: AcceptanceStudy) -> Figure:
    """α̂ of pairs: the best single layers (rows) with every companion; dots mark the best companion of each.

    Raises `LayerwaveError` when single layers alone were scored.
    """
    if np.isnan(study.pairs).all():
        raise LayerwaveError("only single layers were scored: study sets of at least two")
    figure = Figure(figsize=(COLUMN, 0.62 * COLUMN))
    axes = figure.subplots()
    colours = colormaps[SEQUENTIAL].with_extremes(bad=GREY)
    image = axes.imshow(study.pairs, cmap=colours, aspect="auto", interpolation="nearest")
    rows = np.arange(len(study.seeds))
    best = np.nanargmax(study.pairs, axis=1)
    axes.plot(best, rows, "o", color=VERMILION, ms=3.5, mec="white", mew=0.6, ls="")
    axes.set_yticks(rows, labels=list(study.seeds))
    axes.set_ylabel("seed layer, best first")
    layer_axis(axes.xaxis, "companion")
    figure.colorbar(image, ax=axes, label=f"{LABEL} of the pair")
    return figure


@styled
def acceptance_ladder(study: AcceptanceStudy) -> Figure:
    """α̂ of the best set of every size, and under it the gain of each added layer with its paired error.

    Bars above are standard errors of the paired difference to the best of all sizes. The smallest set within one of
    them is marked.
    """
    figure = Figure(figsize=(COLUMN, 0.95 * COLUMN))
    values, gains = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    bests = [rung.best for rung in study.ladder]
    sizes = np.arange(1, len(bests) + 1)
    _with_errors(values, sizes.tolist(), bests, [study.behind(scored) for scored in bests], fmt="o-", color=BLACK)
    values.plot(
        len(study.smallest.layers), study.smallest.value, "o", ms=9, mfc="none", mec=GREEN, mew=1.4, ls="",
        label="smallest within one standard error",
    )  # fmt: skip
    for size, scored in zip(sizes, bests, strict=True):
        values.annotate(
            join(scored.layers), (size, scored.value), (7, -3), textcoords="offset points", va="top", fontsize=6.5
        )
    values.set_ylabel(LABEL)
    values.margins(y=0.2)
    steps = [(size, rung.gain) for size, rung in zip(sizes, study.ladder, strict=True) if rung.gain is not None]
    gains.errorbar(
        [size for size, _ in steps],
        [gain.value for _, gain in steps],
        [gain.standard_error for _, gain in steps],
        fmt="s", color=BLUE, capsize=2, elinewidth=0.7,
    )  # fmt: skip
    gains.axhline(0, color=BLACK, lw=0.5)
    gains.set_ylabel("gain over one\nlayer less")
    gains.set_xlabel("number of layers (at the points: 0-based outputs)")
    gains.set_xlim(0.6, len(bests) + 0.8)
    whole_numbers(gains.xaxis)
    figure.legend(*values.get_legend_handles_labels(), loc="outside upper center")
    return figure


@styled
def acceptance_learning(study: AcceptanceStudy, curve: LearningCurve) -> Figure:
    """α̂ of the best, the smallest and the entropy's set when the drafts are fitted on fewer positions.

    Bars are standard errors of the paired difference to the best set. Raises `LayerwaveError` when no part of the
    positions could be fitted.
    """
    if len(curve.points) < 2:
        raise LayerwaveError("; ".join(curve.missing))
    figure = Figure(figsize=(COLUMN, HEIGHT))
    axes = figure.subplots()
    positions = [point.positions for point in curve.points]
    looks = {  # a set in several roles has the look of the last
        study.entropy.layers: ("^:", VERMILION, "entropy's"),
        study.smallest.layers: ("s--", BLUE, "smallest"),
        study.best.layers: ("o-", GREEN, "best"),
    }
    for followed in range(len(curve.points[0].sets)):
        sets, behind = zip(*((point.sets[followed], point.behind[followed]) for point in curve.points), strict=True)
        style, colour, role = looks[sets[0].layers]
        _with_errors(axes, positions, sets, behind, fmt=style, color=colour, label=f"{role}: {join(sets[0].layers)}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(positions, labels=[f"{count:,}" for count in positions])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("positions that the drafts were fitted on")
    axes.set_ylabel(LABEL)
    axes.legend(title="sets of 0-based outputs", title_fontsize=6.5)
    return figure


def _with_errors(
    axes: Axes, places: Sequence[int], sets: Sequence[ScoredSet], behind: Sequence[Difference], **look: str
) -> None:
    """α̂ of sets, with the error of each one's difference to another set."""
    values, errors = [scored.value for scored in sets], [apart.standard_error for apart in behind]
    axes.errorbar(places, values, errors, capsize=1.5, elinewidth=0.7, **look)
