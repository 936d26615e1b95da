"""The figures of the report, each with a title and the words that stand for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.figure import Figure

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.report.figures import (
    beam_tree,
    cka_filter_heatmaps,
    cka_heatmap,
    pair_heatmap,
    prompt_curves,
    prompt_variance,
    variance_over_prompts,
    wave,
)
from layerwave.report.svg import inline_svg
from layerwave.selection import Selection, chooser, find_transitions


@dataclass(frozen=True)
class Picture:
    """One figure of the page."""

    title: str
    svg: Markup
    caption: str
    wide: bool = False


class Pictures:
    """Figures drawn, and for each other one its title and why it is missing."""

    def __init__(self, name: str):
        self.name = name
        """Unique in the page: ids inside the figures start with it."""
        self.drawn: list[Picture] = []
        self.missing: list[tuple[str, str]] = []

    def add(self, title: str, draw: Callable[[], tuple[Figure, str]], wide: bool = False) -> None:
        """Draws one figure with its caption, or notes why it cannot be."""
        try:
            figure, caption = draw()
        except LayerwaveError as error:
            self.missing.append((title, str(error)))
            return
        svg = inline_svg(figure, f"{self.name}{len(self.drawn)}", f"{title}. {caption}")
        self.drawn.append(Picture(title, svg, caption, wide))


def pictures(calibration: Calibration, selections: Sequence[Selection]) -> Pictures:
    """The figures of the paper that this calibration allows."""
    page = Pictures("figure")
    page.add("The wave", lambda: (wave(calibration, selections), _wave_caption(calibration)), wide=True)
    page.add("Single prompts", lambda: (prompt_curves(calibration), PROMPTS))
    page.add(
        "Variance over prompts", lambda: (prompt_variance(calibration), variance_over_prompts(calibration).reading)
    )
    page.add("Pairs of layers", lambda: (pair_heatmap(calibration), PAIRS))
    page.add("CKA between layers", lambda: (cka_heatmap(calibration), _cka_caption(calibration)))
    page.add("CKA, debiased", lambda: (cka_heatmap(calibration, estimator="debiased"), DEBIASED))
    page.add("CKA with the entropy filter and without", lambda: (cka_filter_heatmaps(calibration), FILTER))
    for selection in selections:
        if len(selection.beams) > 1:
            title = f"Beam tree of {chooser(selection)}"
            page.add(title, lambda chosen=selection: (beam_tree(chosen), _tree_caption(chosen)))
    return page


PROMPTS = (
    "Matrix entropy over depth of every single prompt. Where the curves lie together, the wave belongs to the target "
    "and not to a prompt (paper, Figure 1)."
)
PAIRS = (
    "Entropy of pairs: the ten best single layers, best on top, each with every companion. A dot marks the best "
    "companion (paper, Figure 3)."
)
DEBIASED = (
    "The same with the debiased estimator, which is near 0 for unrelated layers however few the tokens. What is bright "
    "only in the biased map is an effect of few tokens."
)
FILTER = "The uncertain tokens that the selection uses beside all tokens, on one colour scale (paper, Figure 6)."


def _wave_caption(calibration: Calibration) -> str:
    given = "" if calibration.settings else " The states were given, so there is one curve."
    return (
        f"Matrix entropy of every layer's output and the CKA step to the next layer, {calibration.num_layers} layers "
        f"(paper, Figure 2). Diamonds: the layers of the selections.{given}"
    )


def _cka_caption(calibration: Calibration) -> str:
    found = find_transitions(calibration)
    where = f"after layers {', '.join(map(str, found.peaks))}" if found.peaks else "nowhere clearly"
    return (
        f"How alike the layers are. Dashed lines are compartment boundaries, peaks of the transition: {where} "
        f"(paper, Figure 5). With {calibration.sums.shape[2]} tokens the biased estimator is high even for unrelated "
        "layers."
    )


def _tree_caption(selection: Selection) -> str:
    return (
        "Every kept set at each depth, best on top; lines lead to the sets it was reached from. The way to "
        f"{', '.join(map(str, selection.layers))} is thick (paper, Figure 7)."
    )
