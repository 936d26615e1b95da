"""What all figures share: colours, sizes, the layer axis, writing to a file."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from matplotlib import rc_context
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from layerwave.files.writing import whole_file

# Okabe and Ito's palette: told apart by readers with any colour vision.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION = "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
PURPLE, GREY = "#CC79A7", "#8C8C8C"

_COLOURS, _MARKERS = (BLUE, ORANGE, VERMILION, GREEN, PURPLE, SKY, BLACK, GREY), "os^DvPX"

SEQUENTIAL = "cividis"
"""Colour map of every heat map and of the beam tree: lightness rises with the value, for any colour vision."""

COLUMN = 3.4
"""Width in inches of a figure: one column of a paper, at which the type sizes below are read as printed."""

STYLE = {
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "figure.constrained_layout.use": True,
}

Given = ParamSpec("Given")


def styled(draw: Callable[Given, Figure]) -> Callable[Given, Figure]:
    """Runs a figure function with `STYLE`, whatever the settings of the user's session."""

    @wraps(draw)
    def with_style(*args: Given.args, **options: Given.kwargs) -> Figure:
        with rc_context(STYLE):
            figure = draw(*args, **options)
            figure.draw_without_rendering()  # ticks are made, and take their sizes, when first drawn
            return figure

    return with_style


def look(place: int) -> tuple[str, str]:
    """Colour and marker of the first, second, … of things that are compared; after 56 they repeat."""
    return _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]


def layer_axis(axis: Axis, what: str = "layer") -> None:
    """Whole numbers, and a label that says which numbering they mean."""
    axis.set_label_text(f"{what} l (0-based output; boundary b = l + 1)")
    whole_numbers(axis)


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers only."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))


def plain(text: str) -> str:
    """Text from a file as matplotlib shows it unchanged: a dollar would start mathematics."""
    return text.replace("$", r"\$")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes the figure whole or not at all; the suffix (.png, .svg) decides the format.

    Raises:
      LayerwaveError: the file cannot be written.
    """
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=200)
