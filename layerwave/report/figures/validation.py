"""A validation in figures: τ against criteria, how well each ranks the sets, and who left a cascade when."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from layerwave.errors import LayerwaveError
from layerwave.report.figures.labels import label_column, label_points
from layerwave.report.figures.style import BLACK, COLUMN, GREEN, GREY, VERMILION, look, plain, styled
from layerwave.validation.report_card import ALL, REFERENCE, WITHIN, CriterionCard, GroupCard, ReportCard, scores_of
from layerwave.validation.result import Layers, Stage, Validation

MAIN = (REFERENCE, "acceptance")
"""Criteria whose panels are large and have the names of the sets."""

UNNAMED = ("random", "acceptance_beam", "given")
"""Who chose sets that no label names."""


@styled
def accepted_by_criteria(validation: Validation, card: ReportCard) -> Figure:
    """τ (AVG) of every set, minus the mean of all, against the main criteria, with paired 95 % intervals.

    Labels say who chose a set. Raises `LayerwaveError` when no main criterion scored the sets.
    """
    scores = {name: values for name, values in scores_of(validation).items() if name in MAIN}
    if not scores:
        raise LayerwaveError(f"the sets have no scores by {' or '.join(MAIN)}")
    figure = Figure(figsize=(2 * COLUMN, 0.9 * COLUMN))
    panels = figure.subplots(1, len(scores), sharey=True, squeeze=False)[0]
    for axes, (name, values) in zip(panels, scores.items(), strict=True):
        _scatter(axes, validation, card, values, bars=True)
        axes.set_xlabel({REFERENCE: "matrix entropy $S_1$ (nats)", "acceptance": "predicted acceptance α̂"}[name])
        axes.set_title(_correlations(card, name))
        axes.margins(x=0.12, y=0.1)
    panels[0].set_ylabel(f"τ minus the mean of all sets, {_mean(card):.2f} tokens")
    _legend_of_sizes(figure, validation)
    _label(figure, dict(zip(scores, panels, strict=True)), validation, card)
    return figure


@styled
def accepted_by_other_criteria(validation: Validation, card: ReportCard) -> Figure:
    """The same against all other criteria, without labels and intervals: small multiples on one scale of τ.

    Raises `LayerwaveError` when there is no other.
    """
    scores = {name: values for name, values in scores_of(validation).items() if name not in MAIN}
    if not scores:
        raise LayerwaveError("no other criterion scored the sets")
    across = min(4, len(scores))
    down = -(-len(scores) // across)
    figure = Figure(figsize=(2 * COLUMN, 0.35 + 1.45 * down))
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes, (name, values) in zip(panels.flat, scores.items(), strict=False):
        _scatter(axes, validation, card, values, bars=False)
        axes.set_title(f"{plain(name)}\n{_correlations(card, name)}", fontsize=6.5)
        axes.xaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
        axes.margins(x=0.1, y=0.1)
    for axes in panels.flat[len(scores) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("τ minus the mean")
    _legend_of_sizes(figure, validation)
    return figure


def _mean(card: ReportCard) -> float:
    return sum(tau.value for tau in card.tau) / len(card.tau)


def names_of(validation: Validation) -> dict[Layers, str]:
    """What to call sets that methods or rules chose."""
    known = {c.layers: [name for name in c.names if name not in UNNAMED] for c in validation.candidates}
    return {layers: ", ".join(names) for layers, names in known.items() if names}


def _looks(validation: Validation) -> dict[int, tuple[str, str]]:
    """Colour and marker by number of layers."""
    sizes = sorted({candidate.size for candidate in validation.candidates})
    return {size: look(place) for place, size in enumerate(sizes)}


def _scatter(axes: Axes, validation: Validation, card: ReportCard, values: np.ndarray, *, bars: bool) -> None:
    for size, (colour, marker) in _looks(validation).items():
        members = [m for m, candidate in enumerate(validation.candidates) if candidate.size == size]
        taus = [card.apart[m] for m in members]
        if bars and taus[0].low is not None:
            ends = np.array([[tau.low, tau.high] for tau in taus], float).T
            axes.vlines(values[members], *ends, color=colour, lw=0.6, alpha=0.55)
        axes.plot(
            values[members], [tau.value for tau in taus], marker, color=colour, mec="white", mew=0.4, ms=4.5, ls=""
        )


def _label(figure: Figure, panels: dict[str, Axes], validation: Validation, card: ReportCard) -> None:
    """Names of the sets that a method or rule chose, once the axes have their places."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    looks, sets = _looks(validation), validation.candidates
    called = [names_of(validation).get(candidate.layers, "") for candidate in sets]
    for name, axes in panels.items():
        points = list(zip(scores_of(validation)[name].tolist(), (tau.value for tau in card.apart), strict=True))
        label_points(
            axes,
            [(*points[m], plain(text), looks[sets[m].size][0]) for m, text in enumerate(called) if text],
            [point for point, text in zip(points, called, strict=True) if not text],
        )


def _correlations(card: ReportCard, criterion: str) -> str:
    """ρ overall, and within sizes where there are several."""
    told = []
    for group, where in ((ALL, "all"), (WITHIN, "within sizes")):
        if any(found.name == group for found in card.groups):
            value = card[group][criterion].spearman.value
            told.append(f"{where} –" if value is None else f"{where} {value:.2f}")
    return f"ρ: {', '.join(told)}"


def _legend_of_sizes(figure: Figure, validation: Validation) -> None:
    handles = [
        Line2D([], [], ls="", marker=marker, color=colour, label=f"{size} layer{'s' * (size > 1)}")
        for size, (colour, marker) in _looks(validation).items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


@styled
def criteria_forest(card: ReportCard) -> Figure:
    """Spearman correlation of every criterion with τ, over all sets and within sizes.

    Thick bars: other seeds and questions; thin ones: other sets. Green predicts τ better than raw `S_1` by both, red
    worse. Dashed: what the true τ itself would reach.
    """
    groups = [group for group in card.groups if group.name in (ALL, WITHIN)]
    rows = sorted(groups[-1].criteria, key=_value)
    figure = Figure(figsize=(2 * COLUMN, 0.75 + 0.17 * len(rows)))
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        for height, own in enumerate(group[row.criterion] for row in rows):
            _forest_row(axes, height, own)
        axes.axvline(0, color=BLACK, lw=0.5)
        if group.ceiling is not None:
            axes.axvline(group.ceiling, color=GREY, lw=0.8, ls="--")
        axes.set_xlim(-1.05, 1.05)
        axes.set_title(_title(group))
        axes.set_xlabel("Spearman ρ with τ")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", lw=0.3, color=GREY, alpha=0.4)
    panels[0].set_yticks(range(len(rows)), labels=[plain(_called(row.criterion)) for row in rows])
    panels[0].set_ylim(-0.7, len(rows) - 0.3)
    _legend_of_bars(figure)
    return figure


def _value(own: CriterionCard) -> float:
    return -2.0 if own.spearman.value is None else own.spearman.value


def _called(criterion: str) -> str:
    return f"{criterion} (raw S₁)" if criterion == REFERENCE else criterion


def _title(group: GroupCard) -> str:
    return f"over all {len(group.members)} sets" if group.name == ALL else "within sizes"


def _forest_row(axes: Axes, height: int, own: CriterionCard) -> None:
    found = own.spearman
    if found.value is None:
        axes.text(0.03, height, found.missing, va="center", fontsize=6, color=GREY)
        return
    colour = {"better": GREEN, "worse": VERMILION}.get(own.verdict, BLACK if own.criterion == REFERENCE else GREY)
    for interval, width, alpha in ((found.over_measurements, 4.5, 0.35), (found.over_sets, 0.9, 1.0)):
        if interval is not None:
            axes.plot(interval, [height, height], color=colour, lw=width, solid_capstyle="butt", alpha=alpha)
    axes.plot(found.value, height, "o", color=colour, mec="white", mew=0.5, ms=5)


def _legend_of_bars(figure: Figure) -> None:
    handles = [
        Line2D([], [], color=GREY, lw=4.5, alpha=0.35, label="other seeds and questions"),
        Line2D([], [], color=GREY, lw=0.9, label="other sets"),
        Line2D([], [], color=GREY, lw=0.8, ls="--", label="noise ceiling"),
        Line2D([], [], color=GREEN, marker="o", ls="", label="better than raw $S_1$"),
        Line2D([], [], color=VERMILION, marker="o", ls="", label="worse"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


@styled
def cascade_funnel(stages: Sequence[Stage], names: Mapping[Layers, str] | None = None) -> Figure:
    """Rank of every set at every stage of a cascade; a line goes on while a set stays.

    Args:
        stages: in order.
        names: what to call sets that are known by a name.

    Raises `LayerwaveError` without stages.
    """
    if not stages:
        raise LayerwaveError("there was no cascade: all sets were trained to the end")
    figure = Figure(figsize=(2 * COLUMN, 1.1 * COLUMN))
    axes = figure.subplots()
    ranks = [{found.layers: rank for rank, found in enumerate(stage.standings, 1)} for stage in stages]
    finalists = {found.layers for found in stages[-1].standings if found.stays}
    for place, stage in enumerate(stages):
        left = [ranks[place][found.layers] for found in stage.standings if not found.stays]
        axes.plot([place] * len(left), left, "x", color=GREY, ms=3, mew=0.7)
        for found in stage.standings:
            kept = found.layers in finalists
            rank = ranks[place][found.layers]
            if place and found.layers in ranks[place - 1]:
                axes.plot(
                    [place - 1, place], [ranks[place - 1][found.layers], rank],
                    color=GREEN if kept else GREY, lw=1.4 if kept else 0.5, zorder=2 + kept,
                )  # fmt: skip
            if found.stays:
                axes.plot(place, rank, "o", color=GREEN if kept else GREY, ms=3.5, zorder=4)
    axes.set_yscale("log")
    most = max(map(len, ranks))
    ticks = [tick for tick in (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if tick <= most]
    axes.set_yticks(ticks, labels=list(map(str, ticks)))
    axes.minorticks_off()
    axes.set_ylim(1.5 * most, 0.8)
    axes.set_xlim(-0.25, len(stages) - 0.35)
    axes.set_xticks(range(len(stages)), labels=[_stage_title(stage) for stage in stages])
    axes.set_ylabel("rank (1 is the best)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    _label_leavers(axes, stages, ranks, names or {})
    return figure


def _label_leavers(
    axes: Axes, stages: Sequence[Stage], ranks: Sequence[dict[Layers, int]], names: Mapping[Layers, str]
) -> None:
    """Sets of the last stage, and named ones where they left."""
    for place, stage in enumerate(stages):
        labels = []
        for found in stage.standings:
            if place == len(stages) - 1 or (not found.stays and found.layers in names):
                text = f"{','.join(map(str, found.layers))} {names.get(found.layers, '')}".strip()
                look = (GREEN, "bold") if found.stays else (BLACK, "normal")
                labels.append((float(ranks[place][found.layers]), plain(text), *look))
        label_column(axes, float(place), labels)


def _stage_title(stage: Stage) -> str:
    kept = sum(found.stays for found in stage.standings)
    steps = f"after {stage.steps:,} steps" if stage.steps else "before training"
    return f"{plain(stage.measure)}\n{steps}\n{len(stage.standings)} sets, {kept} stay"
