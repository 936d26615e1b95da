"""Lossless verification of a draft tree from the target's logits at its nodes.

From the root on, the next token is drawn exactly as plain decoding draws it. While a child of the node holds that very
token, the walk goes on there, and the target's pass has already told the logits that come next; the first token that
the tree does not hold ends the round. So the tokens are those of plain decoding whatever the draft proposed: with equal
logits greedy ones are identical, and so are sampled ones from the same keys.

For sampling this is the sequential rejection of EAGLE (children tried one after the other, each accepted with its
probability, which a rejection removes before the rest is renormalised), done in one draw: children are distinct, so the
events are disjoint, child x is accepted with `p(x)` and another token y emitted with `p(y)` either way. What goes wrong
there (`0 <= 0` accepting what cannot be, rests that sum to 0) cannot happen here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32, Key

from layerwave.decoding.sampling import Sampler
from layerwave.decoding.tree import Tree


class Verdict(NamedTuple):
    """What a round decides, over the L levels of a tree.

    accepted: drafted tokens that were accepted; the places 0 … accepted of the other two count, what is behind them is
    left over.
    path: nodes from the root to the last accepted one.
    tokens: what follows each of them: the accepted tokens, and last the bonus token.
    """

    accepted: Int32[Array, " b"]
    path: Int32[Array, "b L"]
    tokens: Int32[Array, "b L"]


def verify(
    tree: Tree,
    logits: Float32[Array, "b n V"],
    levels: int,
    sampler: Sampler,
    keys: Key[Array, " b"],
    places: Int[Array, " b"],
) -> Verdict:
    """Walks down each tree.

    Args:
      logits: the target's, for what follows each node.
      levels: L, nodes of the longest path.
      keys, places: of the sequences, and of the first token of the round in its answer (see `Sampler.draw`).
    """

    def step(state: tuple[Int32[Array, " b"], Array], level: Int32[Array, ""]):
        node_b, going_b = state
        here = jnp.take_along_axis(logits, node_b[:, None, None], axis=1)[:, 0]
        tokens_b = sampler.draw(here, keys, places + level)
        child = tree.valid & (tree.depths > 0) & (tree.parents == node_b[:, None]) & (tree.tokens == tokens_b[:, None])
        found_b = going_b & child.any(axis=1)
        next_b = jnp.where(found_b, jnp.argmax(child, axis=1).astype(jnp.int32), node_b)
        return (next_b, found_b), (found_b, node_b, tokens_b)

    batch = logits.shape[0]
    start = jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)
    _, (found, path, tokens) = jax.lax.scan(step, start, jnp.arange(levels, dtype=jnp.int32))
    return Verdict(jnp.sum(found, axis=0, dtype=jnp.int32), path.T, tokens.T)
