"""Labels that do not lie on each other."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

_SIDES = [
    (far * dx, far * dy)
    for far in (4.0, 9.0, 16.0)
    for dx, dy in ((1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1.5), (0, -1.5))
]
"""Places of a label relative to its point, in points of type, the best first."""

GAP = 7.5
"""Least distance in points between the lines of labels below each other."""


def label_points(
    axes: Axes, points: Sequence[tuple[float, float, str, str]], others: Sequence[tuple[float, float]]
) -> None:
    """Labels points (x, y, text, colour), each on the side where it covers the fewest labels and points; from those
    that had to go far a line leads to the point.

    Limits of the axes must be final. `others`: further points that should stay visible.
    """
    scale = axes.figure.dpi / 72
    taken = [_around(axes, x, y, 3 * scale) for x, y in [*((x, y) for x, y, *_ in points), *others]]
    for x, y, text, colour in points:
        label = axes.annotate(
            text, (x, y), textcoords="offset points", xytext=(0, 0), fontsize=6, color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "lw": 0.3, "color": colour, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        best = min(_SIDES, key=lambda side: _covered(axes, label, side, taken))
        _put(label, best)
        taken.append(_extent(label))


def _extent(label: Annotation) -> Bbox:
    """Of the text, without the line."""
    label.get_window_extent()  # takes it to its place
    return Text.get_window_extent(label)


def _around(axes: Axes, x: float, y: float, radius: float) -> Bbox:
    px, py = axes.transData.transform((x, y))
    return Bbox.from_extents(px - radius, py - radius, px + radius, py + radius)


def _put(label: Annotation, side: tuple[float, float]) -> None:
    dx, dy = side
    label.set_position(side)
    label.set_ha("left" if dx > 0 else "right" if dx < 0 else "center")
    label.set_va("bottom" if dy > 0 else "top" if dy < 0 else "center")


def _covered(axes: Axes, label: Annotation, side: tuple[float, float], taken: Sequence[Bbox]) -> float:
    """Area in pixels that a label there would cover, with a great deal for what leaves the axes."""
    _put(label, side)
    box = _extent(label)
    inside = Bbox.intersection(box, axes.bbox)
    outside = box.width * box.height - (inside.width * inside.height if inside else 0)
    shared = (Bbox.intersection(box, other) for other in taken)
    return 10 * outside + sum(part.width * part.height for part in shared if part)


def label_column(axes: Axes, x: float, labels: Sequence[tuple[float, str, str, str]]) -> None:
    """Labels right of the points (x, y) for labels (y, text, colour, weight), moved apart where they would touch.

    Limits and scale of the axes must be final.
    """
    scale = axes.figure.dpi / 72
    ordered = sorted(labels, key=lambda label: -axes.transData.transform((x, label[0]))[1])
    wanted = [axes.transData.transform((x, y))[1] / scale for y, *_ in ordered]
    floor = axes.bbox.y0 / scale + GAP / 2
    for (y, text, colour, weight), own, place in zip(ordered, wanted, _apart(wanted, floor), strict=True):
        axes.annotate(
            text, (x, y), (12, place - own), textcoords="offset points", va="center", fontsize=6, color=colour,
            weight=weight,
            arrowprops={"arrowstyle": "-", "lw": 0.3, "color": colour, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)},
        )  # fmt: skip


def _apart(wanted: Sequence[float], floor: float) -> list[float]:
    """Descending places moved down, and up again from the floor, until they are `GAP` apart."""
    places = list(wanted)
    for i in range(1, len(places)):
        places[i] = min(places[i], places[i - 1] - GAP)
    below = floor
    for i in reversed(range(len(places))):
        places[i] = max(places[i], below)
        below = places[i] + GAP
    return places
