"""CKA between all layers and its compartments (paper Figs. 5, 6)."""

from typing import Literal

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import cka
from layerwave.report.figures.style import COLUMN, SEQUENTIAL, layer_axis, styled, whole_numbers
from layerwave.selection import Transitions, find_transitions


@styled
def cka_heatmap(
    calibration: Calibration, *, estimator: Literal["biased", "debiased"] = "biased", prominence: float = 0.1
) -> Figure:
    """Figure 5: CKA between all layers; lines: compartment boundaries, the peaks of the transition.

    Arguments and errors as in `find_transitions`. The colours run from the least value of the matrix to 1.
    """
    matrix, found = _measure(calibration, estimator, prominence)
    figure = Figure(figsize=(COLUMN, 0.86 * COLUMN))
    axes = figure.subplots()
    image = _draw(axes, matrix, found, float(matrix.min()))
    axes.set_title(_ends(found))
    layer_axis(axes.xaxis)
    axes.set_ylabel("layer l")
    figure.colorbar(image, ax=axes, label=f"linear CKA, {estimator}", shrink=0.85)
    return figure


@styled
def cka_filter_heatmaps(
    calibration: Calibration, *, estimator: Literal["biased", "debiased"] = "biased", prominence: float = 0.1
) -> Figure:
    """Figure 6: CKA between all layers with the entropy filter and without, on one colour scale.

    Raises `LayerwaveError` as `find_transitions` does, and for states without an unfiltered pool.
    """
    if calibration.settings is None:
        raise LayerwaveError("these states were given as one pool, without a filter to compare: calibrate a target")
    everything = Calibration.from_states(calibration.pool(filtered=False))
    panels = {
        f"uncertain tokens (ρ = {calibration.settings.rho:g})": _measure(calibration, estimator, prominence),
        "all tokens": _measure(everything, estimator, prominence),
    }
    least = min(float(matrix.min()) for matrix, _ in panels.values())
    figure = Figure(figsize=(COLUMN, 0.72 * COLUMN))
    row = figure.subplots(1, 2, sharey=True)
    for axes, (title, (matrix, found)) in zip(row, panels.items(), strict=True):
        image = _draw(axes, matrix, found, least)
        axes.set_title(f"{title}\n{_ends(found)}", fontsize=6.5)
    row[0].set_ylabel("layer l")
    figure.supxlabel("layer l (0-based output; boundary b = l + 1)", fontsize=7)
    figure.colorbar(image, ax=row, label=f"linear CKA, {estimator}", location="top", aspect=35)
    return figure


def _measure(
    calibration: Calibration, estimator: Literal["biased", "debiased"], prominence: float
) -> tuple[Float[np.ndarray, "N N"], Transitions]:
    found = find_transitions(calibration, estimator=estimator, prominence=prominence)
    return cka(calibration.states, estimator), found


def _draw(axes: Axes, matrix: Float[np.ndarray, "N N"], found: Transitions, least: float) -> AxesImage:
    image = axes.imshow(matrix, cmap=SEQUENTIAL, vmin=least, vmax=1, origin="lower", interpolation="nearest")
    for step in found.peaks:
        for line in (axes.axvline, axes.axhline):
            line(step + 0.5, color="white", lw=1.4)
            line(step + 0.5, color="#111111", lw=0.7, ls=(0, (3, 2)))
    for axis in (axes.xaxis, axes.yaxis):
        whole_numbers(axis)
    return image


def _ends(found: Transitions) -> str:
    return f"transitions at b = {', '.join(map(str, found.boundaries))}" if found.peaks else "no transition stands out"
