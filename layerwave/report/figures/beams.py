"""The beam tree of a selection (paper Fig. 7)."""

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from layerwave.errors import LayerwaveError
from layerwave.report.figures.style import COLUMN, SEQUENTIAL, VERMILION, plain, styled, whole_numbers
from layerwave.selection import Selection, chooser
from layerwave.selection.sets import join

ROWS = 20
"""Sets drawn at each depth: the best. A wider beam is cut, and the title says so."""

MARGIN = 0.12
Layers = tuple[int, ...]


@styled
def beam_tree(selection: Selection) -> Figure:
    """Figure 7: the kept sets of every depth, best on top, with their scores as colour and lines to their parents.

    The way to the chosen set is drawn thick. Raises `LayerwaveError` for a selection without beams.
    """
    if not selection.beams:
        raise LayerwaveError(f"this selection ({selection.method}) holds no beams to draw: run `layerwave select`")
    beams = [beam[:ROWS] for beam in selection.beams]
    rows = max(map(len, beams))
    figure = Figure(figsize=(COLUMN, 1.0 + 0.19 * rows))
    axes = figure.subplots()
    way = _way(selection)
    leave = [_label_width(beam, len(beams)) for beam in beams]
    for chosen, colour, width in ((False, "#9a9a9a", 0.5), (True, VERMILION, 1.6)):
        segments = [
            [(depth - 1 + leave[depth - 1], above + 1), (depth, place + 1)]
            for depth in range(1, len(beams))
            for place in range(len(beams[depth]))
            for above in selection.parents[depth][place]
            if above < len(beams[depth - 1]) and ((depth, place) in way and (depth - 1, above) in way) == chosen
        ]
        axes.add_collection(LineCollection(segments, colors=colour, lw=width, zorder=1 + chosen))
    nodes = [(depth, place) for depth, beam in enumerate(beams) for place in range(len(beam))]
    points = axes.scatter(
        [depth for depth, _ in nodes],
        [place + 1 for _, place in nodes],
        c=[beams[depth][place][1] for depth, place in nodes],
        cmap=SEQUENTIAL,
        s=26,
        edgecolors=[VERMILION if node in way else "#9a9a9a" for node in nodes],
        linewidths=[1.4 if node in way else 0.5 for node in nodes],
        zorder=3,
    )
    for depth, place in nodes:
        axes.annotate(
            join(beams[depth][place][0]), (depth, place + 1), (4, 0), textcoords="offset points",
            va="center", fontsize=6, weight="bold" if (depth, place) in way else "normal", zorder=4,
        )  # fmt: skip
    sizes = [len(beam[0][0]) for beam in beams]
    axes.set_xticks(range(len(beams)), labels=[f"{size} layer{'s' * (size > 1)}" for size in sizes])
    axes.set_xlim(-MARGIN, len(beams) - 1 + leave[-1] + MARGIN)
    axes.set_ylim(rows + 0.6, 0.4)
    whole_numbers(axes.yaxis)
    axes.set_ylabel("rank in the beam (1 is the best)")
    axes.set_xlabel("layer sets (0-based outputs; boundary = layer + 1)")
    axes.spines[["top", "right"]].set_visible(False)
    cut = [f"{len(beam)}" for beam in selection.beams if len(beam) > ROWS]
    axes.set_title(f"the best {ROWS} of {cut[-1]} kept sets" if cut else f"{plain(chooser(selection))}: all kept sets")
    unit = "$S_α$ (nats)" if selection.criterion == "entropy" else plain(selection.criterion)
    figure.colorbar(points, ax=axes, label=unit, aspect=30)
    return figure


def _label_width(beam: tuple[tuple[Layers, float], ...], depths: int) -> float:
    """Room for the longest label, in depths: lines to the next beam leave from its right."""
    longest = max(len(join(layers)) for layers, _ in beam)
    return min(0.75, (0.1 + 0.05 * longest) * depths / (0.7 * COLUMN))


def _way(selection: Selection) -> set[tuple[int, int]]:
    """(depth, place) of the chosen set and of every set it was reached from; empty when no beam holds it."""
    last = [layers for layers, _ in selection.beams[-1]]
    if selection.layers not in last:
        return set()
    depth, places = len(selection.beams) - 1, {last.index(selection.layers)}
    way = set()
    while places:
        way |= {(depth, place) for place in places}
        places = {above for place in places for above in selection.parents[depth][place]}
        depth -= 1
    return way
