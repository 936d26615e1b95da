"""Verification changes nothing in the distribution of tokens, whatever the tree."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from layerwave.decoding.sampling import Sampler
from layerwave.decoding.tree import Tree
from layerwave.decoding.verify import verify
from layerwave.errors import LayerwaveError

V = 5
MADE = 3
"""Tokens of a continuation."""
PARENTS = np.array([0, 0, 0, 0, 1, 1, 2, 4, 4, 7])
"""A tree of four levels below the root; the last node is deeper than a continuation is long."""
DEPTHS = np.array([0, 1, 1, 1, 2, 2, 2, 3, 3, 4])
CHILD = np.array([0, 0, 1, 2, 0, 1, 0, 0, 1, 0])
"""Which of its parent's children a node is."""

# The target: logits after each prefix of up to seven tokens, by the prefix's number (see `number`).
LOGITS = (1.5 * np.random.default_rng(3).normal(size=(sum(V**i for i in range(8)), V))).astype(np.float32)
SAMPLERS = {
    "temperature": Sampler(0.8),
    "top-k": Sampler(1.0, top_k=3),
    "top-p": Sampler(1.3, top_p=0.7),
    "all": Sampler(0.9, top_k=4, top_p=0.8),
}


checked = jax.jit(verify, static_argnums=(2, 3))


def number(prefix, token):
    """Numbers of all sequences of tokens, the empty one being 0."""
    return prefix * V + token + 1


def probabilities(logits, sampler):
    p = np.asarray(jax.nn.softmax(sampler.warp(jnp.asarray(logits)), axis=-1), np.float64)
    return p / p.sum(axis=-1, keepdims=True)


def tree_of(order):
    """Trees for a batch: `order (b, V)` ranks the tokens, and a node holds the one at its place among siblings."""
    batch = len(order)
    sees = np.eye(len(PARENTS), dtype=bool)
    for node in range(1, len(PARENTS)):
        sees[node] |= sees[PARENTS[node]]

    def shared(x):
        return jnp.broadcast_to(jnp.asarray(x)[None], (batch, *x.shape))

    tokens = jnp.asarray(order[:, CHILD], jnp.int32)
    valid = shared(np.ones(len(PARENTS), bool))
    parents, depths = shared(PARENTS.astype(np.int32)), shared(DEPTHS.astype(np.int32))
    return Tree(tokens, parents, depths, valid.astype(jnp.float32), valid, shared(sees))


def continuations(draws, sampler, seed, orders):
    """`(draws, MADE)` tokens by rounds of verification; the draft ranks tokens by `orders[number of the prefix]`."""
    keys = jax.random.split(jax.random.key(seed), draws)
    prefix, length = np.zeros(draws, np.int64), np.zeros(draws, np.int64)
    made = np.zeros((draws, MADE + 5), np.int64)
    rounds = 0
    for _ in range(MADE):
        tree = tree_of(orders[prefix])
        numbers = np.zeros((draws, len(PARENTS)), np.int64)
        numbers[:, 0] = prefix
        for node in range(1, len(PARENTS)):
            numbers[:, node] = number(numbers[:, PARENTS[node]], np.asarray(tree.tokens[:, node]))
        verdict = checked(tree, jnp.asarray(LOGITS[numbers]), 5, sampler, keys, jnp.asarray(length, jnp.int32))
        accepted, _, tokens = map(np.asarray, verdict)
        going = length < MADE
        rounds += going.sum()
        for place in range(5):
            now = going & (place <= accepted)
            made[now, length[now]] = tokens[now, place]
            prefix[now] = number(prefix[now], tokens[now, place])
            length[now] += 1
        # A continuation that is long enough goes no further: forget what the last round made beyond it.
        prefix = np.where(length < MADE, prefix, 0)
    return made[:, :MADE], draws * MADE / rounds


def chi_square(observed, expected):
    """The p-value of counts; cells that expect less than 5 are one cell, and impossible ones must be empty."""
    observed, expected = observed.ravel(), expected.ravel()
    assert not observed[expected == 0].any()
    few = expected < 5
    observed = np.append(observed[~few], observed[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    return chi2.sf(statistic, used.sum() - 1)


def expected_continuations(draws, sampler):
    p = probabilities(LOGITS[: 1 + V + V**2], sampler)
    found = np.zeros((V,) * MADE)
    for a, b, c in product(range(V), repeat=MADE):
        first, second = number(0, a), number(number(0, a), b)
        found[a, b, c] = draws * p[0, a] * p[first, b] * p[second, c]
    return found


def counts(made):
    found = np.zeros((V,) * MADE)
    np.add.at(found, tuple(made.T), 1)
    return found


def drafts():
    """What a draft may rank first after each prefix: anything, the most probable tokens, the least probable ones."""
    anything = np.argsort(np.random.default_rng(0).random(LOGITS.shape), axis=1)
    return {"random": anything, "good": np.argsort(-LOGITS, axis=1), "adverse": np.argsort(LOGITS, axis=1)}


@pytest.mark.parametrize(
    ("name", "draft"), [*((name, "random") for name in SAMPLERS), ("temperature", "good"), ("temperature", "adverse")]
)
def test_distribution_of_continuations(name, draft):
    draws = 100_000
    made, _ = continuations(draws, SAMPLERS[name], 11, drafts()[draft])
    assert chi_square(counts(made), expected_continuations(draws, SAMPLERS[name])) > 0.01


def test_the_test_would_see_a_fault():
    """A temperature that is 3 % off is rejected."""
    draws = 100_000
    made, _ = continuations(draws, SAMPLERS["temperature"], 11, drafts()["good"])
    assert chi_square(counts(made), expected_continuations(draws, Sampler(0.824))) < 1e-6


def test_good_drafts_need_fewer_rounds():
    sampler = SAMPLERS["temperature"]
    made_a_round = {name: continuations(100_000, sampler, 5, order)[1] for name, order in drafts().items()}
    assert made_a_round["good"] > made_a_round["random"] > made_a_round["adverse"] > 1


def sequential_rejection(p, order, rng):
    """EAGLE's `evaluate_posterior` for point-mass proposals: (node, bonus token)."""
    node = 0
    while True:
        rest = p[node].copy()
        for child in np.flatnonzero((PARENTS == node) & (np.arange(len(PARENTS)) > 0)):
            token = order[CHILD[child]]
            if rng.random() < rest[token]:
                node = child
                break
            rest[token] = 0
            if rest.sum() > 0:
                rest = rest / rest.sum()
        else:
            return node, rng.choice(V, p=rest)


def test_it_is_sequential_rejection():
    """The same law of (last accepted node, bonus token), at a target that finds two drafted tokens impossible."""
    rng = np.random.default_rng(1)
    logits = 1.5 * rng.normal(size=(len(PARENTS), V)).astype(np.float32)
    logits[0, 1], logits[1, 3] = -np.inf, -np.inf
    order = np.array([3, 1, 0, 2, 4])
    p = probabilities(logits, Sampler(1.0))
    draws, literal_draws = 100_000, 20_000
    keys = jax.random.split(jax.random.key(2), draws)
    tree = tree_of(np.broadcast_to(order, (draws, V)))
    everywhere = jnp.broadcast_to(jnp.asarray(logits)[None], (draws, *logits.shape))
    verdict = checked(tree, everywhere, 5, Sampler(1.0), keys, jnp.zeros(draws, jnp.int32))
    accepted, path, tokens = map(np.asarray, verdict)
    rows = np.arange(draws)
    found, literal = np.zeros((len(PARENTS), V)), np.zeros((len(PARENTS), V))
    np.add.at(found, (path[rows, accepted], tokens[rows, accepted]), 1)
    for _ in range(literal_draws):
        literal[sequential_rejection(p, order, rng)] += 1

    # Either law in closed form: down to a node with the probabilities of its path, then any token that no child holds.
    exact = np.zeros((len(PARENTS), V))
    reach = np.ones(len(PARENTS))
    for node in range(len(PARENTS)):
        if node:
            reach[node] = reach[PARENTS[node]] * p[PARENTS[node], order[CHILD[node]]]
        held = [order[CHILD[child]] for child in range(1, len(PARENTS)) if PARENTS[child] == node]
        exact[node] = reach[node] * p[node]
        exact[node, held] = 0
    np.testing.assert_allclose(exact.sum(), 1, atol=1e-6)
    assert chi_square(found, draws * exact) > 0.01
    assert chi_square(literal, literal_draws * exact) > 0.01


def test_the_tokens_are_those_that_plain_decoding_draws_from_the_same_keys():
    """A walk from node to child, said literally, in trees that lack nodes and at any place of an answer."""
    batch, sampler, rng = 48, Sampler(0.8), np.random.default_rng(8)
    tree = tree_of(rng.permuted(np.tile(np.arange(V), (batch, 1)), axis=1))
    valid = rng.random((batch, len(PARENTS))) < 0.9
    valid[:, 0] = True
    tree = tree._replace(valid=jnp.asarray(valid))
    held = np.asarray(tree.tokens)
    logits = rng.normal(size=(batch, len(PARENTS), V)).astype(np.float32)
    for node in range(1, len(PARENTS)):  # the target likes what the tree holds
        logits[np.arange(batch), PARENTS[node], held[:, node]] += 1 + DEPTHS[node]
    keys, places = jax.random.split(jax.random.key(4), batch), np.arange(batch, dtype=np.int32)
    verdict = checked(tree, jnp.asarray(logits), 5, sampler, keys, jnp.asarray(places))
    draw = jax.jit(sampler.draw)
    for row in range(batch):
        node = accepted = 0
        while True:
            token = int(draw(logits[row : row + 1, node], keys[row : row + 1], places[row : row + 1] + accepted)[0])
            assert (verdict.path[row, accepted], verdict.tokens[row, accepted]) == (node, token)
            children = [c for c in range(1, len(PARENTS)) if PARENTS[c] == node and valid[row, c]]
            if token not in held[row, children]:
                break
            node, accepted = next(c for c in children if held[row, c] == token), accepted + 1
        assert verdict.accepted[row] == accepted
    assert set(verdict.accepted.tolist()) == {0, 1, 2, 3, 4}


def test_greedy_walks_as_far_as_the_argmax_agrees():
    order = np.array([[2, 4, 1, 0, 3]])
    logits = np.full((1, len(PARENTS), V), -1.0, np.float32)
    for node, best in ((0, 4), (2, 2), (6, 3)):  # node 2 holds 4, its child 6 holds 2, which has no child
        logits[0, node, best] = 1.0
    verdict = verify(
        tree_of(order), jnp.asarray(logits), 5, Sampler(), jax.random.key(0)[None], jnp.zeros(1, jnp.int32)
    )
    assert verdict.accepted.tolist() == [2]
    assert verdict.path[0, :3].tolist() == [0, 2, 6]
    assert verdict.tokens[0, :3].tolist() == [4, 2, 3]


def test_nodes_that_are_not_valid_are_never_accepted():
    order = np.array([[2, 4, 1, 0, 3]])
    tree = tree_of(order)
    tree = tree._replace(valid=tree.depths == 0)
    logits = jnp.zeros((1, len(PARENTS), V)).at[:, :, 2].set(1.0)
    verdict = verify(tree, logits, 5, Sampler(), jax.random.key(0)[None], jnp.zeros(1, jnp.int32))
    assert verdict.accepted.tolist() == [0]
    assert verdict.tokens[0, 0] == 2


def test_warping_by_hand():
    logits = jnp.log(jnp.array([0.4, 0.1, 0.3, 0.2]))

    def warped(**options):
        return jax.nn.softmax(Sampler(1.0, **options).warp(logits)).tolist()

    assert warped(top_k=2) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    assert warped(top_k=9) == pytest.approx([0.4, 0.1, 0.3, 0.2])
    assert warped(top_p=0.65) == pytest.approx([4 / 7, 0, 3 / 7, 0])
    assert warped(top_p=0.75) == pytest.approx([4 / 9, 0, 3 / 9, 2 / 9])
    assert warped(top_p=1e-6) == pytest.approx([1, 0, 0, 0])
    # top-p counts what top-k has left: 0.4 / 0.7 is more than half.
    assert warped(top_k=2, top_p=0.5) == pytest.approx([1, 0, 0, 0])
    squared = np.array([0.16, 0.01, 0.09, 0.04]) / 0.3
    assert jax.nn.softmax(Sampler(0.5).warp(logits)).tolist() == pytest.approx(squared.tolist())


def test_ties_at_the_cut_stay():
    logits = jnp.log(jnp.array([0.25, 0.25, 0.25, 0.25]))
    assert bool(jnp.isfinite(Sampler(1.0, top_k=2).warp(logits)).all())
    assert bool(jnp.isfinite(Sampler(1.0, top_p=0.3).warp(logits)).all())


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"temperature": float("inf")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_faults(settings):
    with pytest.raises(LayerwaveError, match=next(iter(settings))):
        Sampler(**settings)
