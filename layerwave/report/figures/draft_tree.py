"""A draft tree and the path that the target accepted."""

from collections.abc import Sequence

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from layerwave.decoding.tree import Tree
from layerwave.report.figures.style import COLUMN, SEQUENTIAL, VERMILION, plain, styled, whole_numbers

_SHOWN = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


@styled
def draft_tree(tree: Tree, words: Sequence[str], path: Sequence[int] = ()) -> Figure:
    """The valid nodes of the first sequence's tree by depth, with their tokens, the log-probability of the path to each
    as colour, and the accepted path drawn thick.

    Args:
      words: text of each node's token.
      path: accepted nodes from the root on (see `layerwave.decoding.draft_round`).
    """
    parents, depths, scores, valid = (np.asarray(x[0]) for x in (tree.parents, tree.depths, tree.scores, tree.valid))
    nodes = np.flatnonzero(valid)
    heights = _heights(parents, nodes)
    figure = Figure(figsize=(COLUMN, 0.9 + 0.13 * (1 + max(heights.values()))))
    axes = figure.subplots()
    for accepted, colour, width in ((False, "#9a9a9a", 0.5), (True, VERMILION, 1.6)):
        lines = [
            [(depths[parents[node]], heights[parents[node]]), (depths[node], heights[node])]
            for node in nodes[1:]
            if (node in path) == accepted
        ]
        axes.add_collection(LineCollection(lines, colors=colour, lw=width, zorder=1 + accepted))
    points = axes.scatter(
        depths[nodes],
        [heights[node] for node in nodes],
        c=scores[nodes],
        cmap=SEQUENTIAL,
        s=14,
        edgecolors=[VERMILION if node in path else "#9a9a9a" for node in nodes],
        linewidths=[1.2 if node in path else 0.4 for node in nodes],
        zorder=3,
    )
    for node in nodes:
        axes.annotate(
            plain(words[node].translate(_SHOWN)), (depths[node], heights[node]), (3.5, 0), textcoords="offset points",
            va="center", fontsize=5, weight="bold" if node in path else "normal", zorder=4,
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
        )  # fmt: skip
    axes.set_xlim(-0.1, depths[nodes].max() + 0.8)
    axes.set_ylim(max(heights.values()) + 0.8, -0.8)
    axes.set_yticks([])
    whole_numbers(axes.xaxis)
    axes.set_xlabel("tokens drafted on the path")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{len(nodes)} nodes, {max(len(path) - 1, 0)} drafted tokens accepted")
    figure.colorbar(points, ax=axes, label="log-probability of the path under the draft (nats)", aspect=30)
    return figure


def _heights(parents: np.ndarray, nodes: np.ndarray) -> dict[int, float]:
    """Leaves one below the other in the order of a walk down the tree, other nodes in the midst of their children."""
    children: dict[int, list[int]] = {int(node): [] for node in nodes}
    for node in nodes[1:].tolist():
        children[int(parents[node])].append(node)
    heights: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> None:
        nonlocal leaves
        for child in children[node]:
            place(child)
        if children[node]:
            heights[node] = float(np.mean([heights[child] for child in children[node]]))
        else:
            heights[node] = float(leaves)
            leaves += 1

    place(0)
    return heights
