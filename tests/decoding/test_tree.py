"""The tree as arrays against the algorithm one node at a time."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.decoding.tree import TreeSettings, bare_root, grow
from layerwave.errors import LayerwaveError
from tests.decoding.literal_tree import GOLDEN, ROOT, ROWS, SETTINGS, VOCABULARY, golden_trees, tables, tree_of_table


def grown(tables_brv, settings):
    """The trees of a batch of tables (see `tree_of_table`)."""

    @jax.jit
    def run(table):
        def expand(level, tokens, rows, codes):
            ids = jnp.searchsorted(jnp.asarray(VOCABULARY), tokens).astype(jnp.int32)
            codes = (jnp.take_along_axis(codes, rows, axis=1) * 31 + ids + 1) % ROWS
            return jax.vmap(lambda table, codes: table[codes])(table, codes), codes

        batch = len(table)
        codes = jnp.zeros((batch, settings.top_k), jnp.int32)
        root = jnp.full(batch, ROOT, jnp.int32)
        return grow(settings, root, table[:, 0], jnp.asarray(VOCABULARY, jnp.int32), expand, codes)

    return jax.tree.map(np.asarray, run(jnp.asarray(tables_brv)))


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_golden_trees_are_those_of_the_literal_algorithm(golden):
    assert golden_trees() == golden


@pytest.mark.parametrize("name", SETTINGS)
def test_golden(golden, name):
    kinds = tables(seed=7)
    trees = grown(np.stack(list(kinds.values())), SETTINGS[name])
    for i, kind in enumerate(kinds):
        wanted = golden[f"{name}: {kind}"]
        assert trees.tokens[i].tolist() == wanted["tokens"]
        assert trees.parents[i].tolist() == wanted["parents"]
        assert trees.depths[i].tolist() == wanted["depths"]
        assert trees.valid[i].tolist() == [score is not None for score in wanted["scores"]]
        scores = [-np.inf if score is None else score for score in wanted["scores"]]
        np.testing.assert_allclose(trees.scores[i], scores, atol=1e-4)


@pytest.fixture(scope="module")
def many():
    """32 tables of each kind and their trees."""
    settings = TreeSettings(17, 5, 4)
    found = [table for seed in range(32) for table in tables(seed).values()]
    return found, settings, grown(np.stack(found), settings)


def test_many_trees(many):
    for table, *tree in zip(many[0], *many[2][:4], strict=True):
        wanted = tree_of_table(table, many[1])
        assert [x.tolist() for x in tree[:3]] == list(wanted[:3])
        np.testing.assert_array_equal(tree[3], np.float32(wanted[3]))


def test_no_node_is_an_orphan_and_the_rest_is_marked(many):
    _, settings, trees = many
    rows = np.arange(len(trees.tokens))[:, None]
    below = trees.depths > 0
    assert (trees.parents < np.arange(settings.nodes))[below].all()
    assert (trees.depths == np.where(below, trees.depths[rows, trees.parents] + 1, 0)).all()
    assert trees.valid[rows, trees.parents][trees.valid].all()
    assert (trees.valid == (trees.scores > -np.inf)).all()
    # Possible nodes are never displaced by impossible ones: those fill up only where the possible ones have run out.
    assert trees.valid.all(axis=1).any()
    assert not trees.valid.all(axis=1).all()


def test_siblings_are_distinct(many):
    trees = many[2]
    for parents, tokens in zip(trees.parents, trees.tokens, strict=True):
        assert len(set(zip(parents[1:], tokens[1:], strict=True))) == len(tokens) - 1


def test_a_node_sees_its_ancestors_and_itself(many):
    trees = many[2]
    for parents, sees in zip(trees.parents, trees.sees, strict=True):
        for node, seen in enumerate(sees):
            way = {node}
            while node:
                node = int(parents[node])
                way.add(node)
            assert set(np.flatnonzero(seen)) == way


def test_what_is_not_a_probability_is_not_proposed():
    table = np.full((1, ROWS, len(VOCABULARY)), np.nan, np.float32)
    table[0, 0, 3] = -1.0
    tree = grown(table, TreeSettings(5, 2, 3))
    assert tree.valid.tolist() == [[True, True, False, False, False]]
    assert tree.tokens[0, :2].tolist() == [ROOT, VOCABULARY[3]]


def test_the_root_alone():
    tree = bare_root(jnp.array([3, 4], jnp.int32))
    assert tree.tokens.tolist() == [[3], [4]]
    assert tree.sees.all()
    assert tree.valid.all()
    assert not tree.depths.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 1}, "nodes of the tree is 1"),
        ({"depth": 0}, "depth of the tree is 0"),
        ({"top_k": 0}, "top_k of the tree is 0"),
        ({"nodes": 10, "depth": 8, "top_k": 1}, "10 nodes, but depth 8 and top_k 1 make 9 at most"),
        ({"nodes": 1 + 10 + 7 * 100 + 1}, "make 711 at most"),
    ],
)
def test_faults(settings, message):
    with pytest.raises(LayerwaveError, match=message):
        TreeSettings(**settings)


def test_the_greatest_tree_holds_all_candidates():
    assert TreeSettings(711, 8, 10).levels == 9
    assert TreeSettings(3, 8, 10).levels == 3
