"""Scores of pairs (paper Fig. 3)."""

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.figure import Figure

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.report.figures.style import COLUMN, GREY, SEQUENTIAL, VERMILION, layer_axis, styled
from layerwave.selection import make_criterion
from layerwave.selection.sets import ranking


def pair_scores(
    calibration: Calibration, seeds: int = 10
) -> tuple[Int[np.ndarray, " seeds"], Float[np.ndarray, "seeds N"]]:
    """The best single layers, best first, and `S_1` (nats) of each with every companion; NaN with itself.

    Raises `LayerwaveError` for one layer, which has no pairs.
    """
    num_layers = calibration.num_layers
    if num_layers < 2:
        raise LayerwaveError("one layer has no pairs: at least 2 layers are needed")
    _, score = make_criterion(calibration, "entropy", 1.0, "raw")
    singles = np.arange(num_layers)[:, None]
    best = ranking(score(singles), singles)[:seeds]
    first, second = np.meshgrid(best, np.arange(num_layers), indexing="ij")
    apart = first != second
    scores = np.full(first.shape, np.nan)
    scores[apart] = score(np.sort(np.stack([first[apart], second[apart]], 1), axis=1))
    return best, scores


@styled
def pair_heatmap(calibration: Calibration, seeds: int = 10) -> Figure:
    """Figure 3: `S_1` of pairs, the ten best single layers (rows) against all companions.

    Dots mark the best companion of each seed; grey is a layer with itself. Raises `LayerwaveError` for one layer."""
    best, scores = pair_scores(calibration, seeds)
    figure = Figure(figsize=(COLUMN, 0.62 * COLUMN))
    axes = figure.subplots()
    colours = colormaps[SEQUENTIAL].with_extremes(bad=GREY)
    image = axes.imshow(scores, cmap=colours, aspect="auto", interpolation="nearest")
    axes.plot(
        np.nanargmax(scores, axis=1), np.arange(len(best)), "o", color=VERMILION, ms=3.5, mec="white", mew=0.6, ls=""
    )
    axes.set_yticks(np.arange(len(best)), labels=best.tolist())
    axes.set_ylabel("seed layer, best first")
    layer_axis(axes.xaxis, "companion")
    figure.colorbar(image, ax=axes, label="$S_1$ of the pair (nats)")
    return figure
