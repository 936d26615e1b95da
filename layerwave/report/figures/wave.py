"""The activation wave of one target: the figure of the quickstart, and the first of a report."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from layerwave.calibration import Calibration
from layerwave.report.figures.curves import layer_entropies
from layerwave.report.figures.style import BLACK, BLUE, GREEN, ORANGE, VERMILION, plain
from layerwave.selection import Selection, chooser, find_transitions


def wave(calibration: Calibration, selections: Sequence[Selection] = ()) -> Figure:
    """The activation wave: `S_1` of every layer, the CKA transition to the next, and where given sets lie."""
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    entropy, change = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_entropies(entropy, calibration)
    _draw_selections(entropy, selections)
    _draw_transitions(change, calibration)
    change.set_xlabel("layer l (its output; 0 is the first)")
    change.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=4))
    boundary = entropy.secondary_xaxis("top", functions=(lambda l: l + 1, lambda b: b - 1))
    boundary.set_xlabel("boundary b = l + 1 (0 is the embedding)")
    boundary.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=4))
    figure.suptitle(f"{plain(calibration.target_name)}: {calibration.num_layers} layers", fontsize="medium")
    return figure


def _draw_entropies(axes: Axes, calibration: Calibration) -> None:
    """`S_1` of the chosen pool, and of the pools that show what it owes to the filter and to attention sinks."""
    if calibration.settings is None:
        pools = ((True, None, "o-", BLACK, "given states"),)
    else:
        chosen, rho = calibration.settings.sinks, calibration.settings.rho
        other = "drop" if chosen == "keep" else "keep"
        said = {"keep": "attention sinks kept", "drop": "attention sinks dropped"}
        pools = (
            (True, chosen, "o-", BLACK, f"uncertain tokens (ρ = {rho:g}), {said[chosen]}"),
            (True, other, "s--", VERMILION, f"uncertain tokens (ρ = {rho:g}), {said[other]}"),
            (False, chosen, "^:", BLUE, f"all tokens, {said[chosen]}"),
        )
    for filtered, sinks, style, colour, label in pools:
        if calibration.blocks(filtered=filtered, sinks=sinks):
            entropy = layer_entropies(calibration.pool(filtered=filtered, sinks=sinks))
            axes.plot(np.arange(len(entropy)), entropy, style, color=colour, ms=4, lw=1.3, label=label)
        else:
            axes.plot([], [], style, color=colour, ms=4, lw=1.3, label=f"{label}: no block")
    axes.set_ylabel("matrix entropy $S_1$ (nats)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small", frameon=False)


def _draw_selections(axes: Axes, selections: Sequence[Selection]) -> None:
    """A row of marks for each set below the curves."""
    if not selections:
        return
    top = axes.get_ylim()[1]
    heights = [-0.08 * row * top for row in range(1, len(selections) + 1)]
    for height, selection in zip(heights, selections, strict=True):
        axes.plot(selection.layers, [height] * len(selection.layers), "D", color=GREEN, ms=5)
        axes.annotate(
            f" {plain(chooser(selection))}",
            (0, height),
            xycoords=("axes fraction", "data"),
            fontsize="x-small",
            va="center",
        )
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.set_ylim(heights[-1] - 0.08 * top, top)
    axes.axhline(0, color=BLACK, lw=0.6)


def _draw_transitions(axes: Axes, calibration: Calibration) -> None:
    found = find_transitions(calibration)
    axes.plot(np.arange(len(found.delta)), found.delta, "o-", color=ORANGE, ms=4, lw=1.3)
    for step in found.peaks:
        axes.axvline(step, color=GREEN, lw=1, ls="--")
    axes.set_ylabel("transition $δ_l$ to layer l + 1\n(biased CKA)")
    axes.set_ylim(bottom=0)
    if found.peaks:
        axes.plot([], [], color=GREEN, lw=1, ls="--", label="compartment ends")
        axes.legend(fontsize="x-small", frameon=False)
