"""Entropy over depth: of single prompts, of several targets, and its variance over prompts (paper Figs. 1, 2, 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import gram, matrix_entropy
from layerwave.report.figures.style import (
    BLACK,
    BLUE,
    COLUMN,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    layer_axis,
    plain,
    styled,
)

EDGE_SHARE = 7 / 36
"""Share of the depth that is early, and that is late: the paper's 7 of 36 layers of Qwen3-4B."""

ENTROPY_LABEL = "matrix entropy $S_1$ (nats)"


def layer_entropies(states: Float[np.ndarray, "N B D"]) -> Float[np.ndarray, " N"]:
    """`S_1` of each layer, nats (paper eq. 6)."""
    return np.asarray(matrix_entropy(gram(states)))


@styled
def prompt_curves(calibration: Calibration) -> Figure:
    """Figure 1: `S_1` over depth of every single prompt, their median, and the mean over blocks that selects.

    Raises `LayerwaveError` for states without samples, and when no sample gave a block.
    """
    curves = _sample_curves(calibration, filtered=True)
    curves = curves[~np.isnan(curves).any(axis=1)]
    if not len(curves):
        raise LayerwaveError("no sample gave a block of its own: calibrate with longer conversations")
    layers = np.arange(calibration.num_layers)
    figure = Figure(figsize=(COLUMN, 0.72 * COLUMN))
    axes = figure.subplots()
    # Rasterised, so that the size of an SVG does not grow with the number of samples.
    lines = LineCollection([np.stack([layers, curve], 1) for curve in curves], colors=SKY, lw=0.5, rasterized=True)
    lines.set_alpha(min(0.6, max(0.1, 20 / len(curves))))
    axes.add_collection(lines)
    axes.plot([], [], color=SKY, lw=1, label=f"single prompts ({len(curves)})")
    axes.plot(layers, np.median(curves, axis=0), "--", color=BLUE, label="their median")
    axes.plot(layers, layer_entropies(calibration.states), "o-", color=BLACK, label="mean over all blocks")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(ENTROPY_LABEL)
    layer_axis(axes.xaxis)
    axes.set_xlim(-0.5, calibration.num_layers - 0.5)
    axes.legend()
    return figure


@styled
def target_curves(calibrations: Sequence[Calibration]) -> Figure:
    """Figure 2: `S_1` of every layer of one or several targets, each from its own calibration."""
    if not calibrations:
        raise LayerwaveError("no calibration to draw: give at least one")
    looks = [("o-", BLACK), ("s--", VERMILION), ("^:", BLUE), ("D-.", GREEN), ("v-", ORANGE), ("P--", PURPLE)]
    figure = Figure(figsize=(COLUMN, 0.72 * COLUMN))
    axes = figure.subplots()
    for place, calibration in enumerate(calibrations):
        style, colour = looks[place % len(looks)]
        label = f"{calibration.num_layers} layers: {plain(calibration.target_name)}"
        axes.plot(layer_entropies(calibration.states), style, color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(ENTROPY_LABEL)
    layer_axis(axes.xaxis)
    axes.legend()
    return figure


@dataclass(frozen=True, eq=False)
class PromptVariance:
    """How far the curves of single prompts lie apart, with the entropy filter and without."""

    reading: str
    """One sentence for a reader."""
    filtered: Float[np.ndarray, " N"]
    """Variance of `S_1` over prompts at each layer, nats squared (divided by samples - 1)."""
    unfiltered: Float[np.ndarray, " N"]
    """The same without the filter, over the same prompts."""
    prompts: int
    """Prompts that gave a block both with the filter and without."""
    parts: tuple[tuple[str, range, float], ...]
    """Name, layers, and percentage by which the filter cuts the mean variance there (negative: it adds)."""


def depth_parts(num_layers: int) -> dict[str, range]:
    """Early, middle and late layers: 7/36 of the depth at either end, rounded, at least one layer.

    It is the paper's split of Qwen3-4B's 36 layers, 0-6, 7-28, 29-35, scaled to any depth.
    Raises `LayerwaveError` for fewer than three layers.
    """
    if num_layers < 3:
        raise LayerwaveError(f"{num_layers} layers have no early, middle and late part: at least 3 are needed")
    edge = max(1, round(EDGE_SHARE * num_layers))
    return {
        "early": range(edge),
        "middle": range(edge, num_layers - edge),
        "late": range(num_layers - edge, num_layers),
    }


def variance_over_prompts(calibration: Calibration) -> PromptVariance:
    """Variance over prompts at each layer, and the filter's cut of its mean over early, middle and late layers.

    Raises `LayerwaveError` for states without samples, fewer than three layers, and fewer than two prompts that gave
    a block both with the filter and without.
    """
    with_filter, without = (_sample_curves(calibration, filtered=choice) for choice in (True, False))
    both = ~(np.isnan(with_filter).any(axis=1) | np.isnan(without).any(axis=1))
    if both.sum() < 2:
        raise LayerwaveError(f"{both.sum()} prompts gave a block in both pools, a variance needs 2: give longer ones")
    filtered, unfiltered = (np.var(c[both].astype(np.float64), axis=0, ddof=1) for c in (with_filter, without))
    parts = tuple(
        (name, layers, float(100 * (1 - filtered[layers].mean() / unfiltered[layers].mean())))
        for name, layers in depth_parts(calibration.num_layers).items()
    )
    said = ", ".join(f"{-cut:+.1f} % ({name}, layers {_span(layers)})" for name, layers, cut in parts)
    reading = f"Over {both.sum()} prompts the entropy filter changes the variance of S_1 by {said}."
    return PromptVariance(reading, filtered, unfiltered, int(both.sum()), parts)


@styled
def prompt_variance(calibration: Calibration) -> Figure:
    """Figure 4: variance of `S_1` over prompts with and without the entropy filter, and the cut per part of the depth.

    Raises `LayerwaveError` as `variance_over_prompts` does.
    """
    found = variance_over_prompts(calibration)
    figure = Figure(figsize=(COLUMN, 0.75 * COLUMN))
    axes = figure.subplots()
    axes.plot(found.unfiltered, "^:", color=BLUE, label="all tokens")
    axes.plot(found.filtered, "o-", color=BLACK, label=f"uncertain tokens (ρ = {calibration.settings.rho:g})")
    top = 1.25 * max(found.filtered.max(), found.unfiltered.max())
    axes.set_ylim(0, top or 1)
    for name, layers, cut in found.parts:
        axes.text(
            (layers[0] + layers[-1]) / 2, 0.98, f"{name}\n{-cut:+.0f} %", transform=axes.get_xaxis_transform(),
            ha="center", va="top", fontsize=6.5,
        )  # fmt: skip
        if name != "late":
            axes.axvline(layers[-1] + 0.5, color=BLACK, lw=0.5, ls=(0, (4, 3)))
    axes.set_xlim(-0.5, calibration.num_layers - 0.5)
    axes.set_ylabel(f"variance over {found.prompts} prompts (nats²)")
    layer_axis(axes.xaxis)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _sample_curves(calibration: Calibration, filtered: bool) -> Float[np.ndarray, "S N"]:
    if calibration.settings is None:
        raise LayerwaveError("these states were given without samples, so there are no prompts: calibrate a target")
    return calibration.sample_curves(filtered=filtered)


def _span(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
