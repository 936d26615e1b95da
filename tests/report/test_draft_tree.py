"""The picture of a draft tree shows its nodes, links and accepted path."""

import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.decoding.tree import Tree
from layerwave.report.figures.draft_tree import draft_tree

PARENTS = [0, 0, 0, 1, 1, 2, 0]
WORDS = ["Once", " upon", "\n", "$5", "a", "b", "never"]
SCORES = [*np.log([1, 0.5, 0.25, 0.2, 0.1, 0.2]), -np.inf]


@pytest.fixture(scope="module")
def axes():
    count = len(PARENTS)
    tree = Tree(
        tokens=jnp.zeros((1, count), jnp.int32),
        parents=jnp.array([PARENTS], jnp.int32),
        depths=jnp.array([[0, 1, 1, 2, 2, 2, 1]], jnp.int32),
        scores=jnp.array([SCORES], jnp.float32),
        valid=jnp.array([[True] * 6 + [False]]),
        sees=jnp.zeros((1, count, count), bool),
    )
    return draft_tree(tree, WORDS, (0, 1, 4)).axes[0]


def test_nodes(axes):
    points = axes.collections[2]
    places = {tuple(place) for place in points.get_offsets().tolist()}
    assert len(places) == 6  # no node on another, and the invalid one left out
    assert points.get_offsets()[:, 0].tolist() == [0, 1, 1, 2, 2, 2]
    np.testing.assert_allclose(points.get_array(), SCORES[:6], rtol=1e-6)
    assert [text.get_text() for text in axes.texts] == ["Once", "␣upon", "⏎", r"\$5", "a", "b"]
    assert "6 nodes, 2 drafted tokens accepted" in axes.get_title()


def test_links_and_accepted_path(axes):
    thin, thick, points = axes.collections
    at = {tuple(place): node for node, place in enumerate(points.get_offsets().tolist())}

    def links(lines):
        return {tuple(at[tuple(end)] for end in segment.tolist()) for segment in lines.get_segments()}

    assert links(thick) == {(0, 1), (1, 4)}
    assert links(thin) == {(0, 2), (1, 3), (2, 5)}
