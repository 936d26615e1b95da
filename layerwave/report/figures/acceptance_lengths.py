"""Accepted lengths of drafts: by columns of the benchmark, and how acceptance falls with depth."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from layerwave.decoding.evaluation import Evaluation
from layerwave.decoding.questions import COLUMNS
from layerwave.decoding.tau import Estimate, Summary, summarize
from layerwave.report.figures.style import COLUMN, GREY, look, plain, styled, whole_numbers


@styled
def acceptance_lengths(evaluation: Evaluation) -> Figure:
    """τ of every draft (left) and conditional acceptance by depth (right), a row for each tree and temperature.

    Bars are 95 % bootstrap intervals over questions; a column of a single question has none.
    """
    settings, summaries = evaluation.settings, summarize(evaluation)
    rows = [(nodes, temperature) for nodes in settings.nodes for temperature in settings.temperatures]
    figure = Figure(figsize=(2 * COLUMN, 0.5 + 1.5 * len(rows)))
    grid = figure.subplots(len(rows), 2, sharex="col", sharey="col", width_ratios=(3, 1), squeeze=False)
    for (lengths, depths), (nodes, temperature) in zip(grid, rows, strict=True):
        chosen = [s for s in summaries if (s.nodes, s.temperature) == (nodes, temperature)]
        _draw_lengths(lengths, chosen)
        lengths.set_title(f"{nodes} nodes, temperature {temperature:g}")
        lengths.set_ylabel("τ (tokens a round)")
        for place, summary in enumerate(chosen):
            colour, marker = look(place)
            acceptance = summary.overall.acceptance
            depths.plot(range(1, len(acceptance) + 1), acceptance, marker=marker, color=colour)
        depths.set_ylim(0, 1)
        depths.set_ylabel("acceptance, given\nthe token above")
    grid[-1, 1].set_xlabel("depth in the tree")
    whole_numbers(grid[-1, 1].xaxis)
    figure.suptitle(f"{plain(evaluation.target)}, {len(evaluation.ids)} questions", fontsize="medium")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _draw_lengths(axes: Axes, summaries: list[Summary]) -> None:
    names = [*COLUMNS, "AVG"]
    for place, summary in enumerate(summaries):
        colour, marker = look(place)
        estimates = {name: group.tau for name, group in summary.columns.items()} | {"AVG": summary.average}
        aside = 0.6 * ((place + 0.5) / len(summaries) - 0.5)
        places = [names.index(name) + aside for name in estimates]
        axes.errorbar(
            places,
            [estimate.value for estimate in estimates.values()],
            yerr=list(zip(*map(_bars, estimates.values()), strict=True)),
            fmt=marker,
            color=colour,
            elinewidth=0.8,
            label=plain(summary.draft),
        )
    axes.axhline(1, color=GREY, lw=0.6, ls=":")
    axes.axvline(len(COLUMNS) - 0.5, color=GREY, lw=0.6)
    axes.set_xticks(range(len(names)), labels=names, rotation=35)


def _bars(estimate: Estimate) -> tuple[float, float]:
    """Lengths of the bars below and above."""
    if estimate.low is None or estimate.high is None:
        return 0.0, 0.0
    return max(0.0, estimate.value - estimate.low), max(0.0, estimate.high - estimate.value)
