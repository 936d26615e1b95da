"""The draft tree of EAGLE-2 (arXiv 2406.16858) as arrays of fixed size.

Level by level, the `k` most probable children of each frontier node become candidates; a candidate's score is the
log-probability of its path under the draft, and the best `k` of a level are the next frontier. In the end the best of
all candidates make the tree. Ties go to the candidate that was made earlier. A child's score is at most its parent's
and the parent was made earlier, so the parent of a chosen candidate is always chosen, also where the child's
probability is exactly 1 or both are impossible.

Letters: `b` sequences, `n` nodes, `k` children, `R` candidates with the root, `V`/`Vd` tokens of target/draft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32

from layerwave.errors import LayerwaveError


@dataclass(frozen=True)
class TreeSettings:
    """Size and shape of a draft tree. Raises `LayerwaveError` for sizes that no tree has.

    A chain is the case `top_k=1` with `nodes = depth + 1`.
    """

    nodes: int = 60
    """Tokens of one verification pass, the root included: `total_token` of EAGLE's EaModel, SGLang's
    `num_draft_tokens`. The root is the last token that was made, so `nodes - 1` are drafted."""
    depth: int = 8
    """Drafted tokens of the longest path, and passes of the draft in a round. EAGLE counts one less (its `depth=7`)."""
    top_k: int = 10
    """Children of a node that are considered, and nodes of a level that get children."""

    def __post_init__(self) -> None:
        for name, least in (("nodes", 2), ("depth", 1), ("top_k", 1)):
            if getattr(self, name) < least:
                raise LayerwaveError(f"{name} of the tree is {getattr(self, name)}, expected at least {least}")
        most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
        if self.nodes > most:
            raise LayerwaveError(
                f"a tree of {self.nodes} nodes, but depth {self.depth} and top_k {self.top_k} make {most} at most: "
                "lower nodes, or raise one of the others"
            )

    @property
    def levels(self) -> int:
        """Nodes of the longest path, the root included."""
        return min(self.depth + 1, self.nodes)


class Tree(NamedTuple):
    """A tree for each sequence; parents stand before their children, the root in place 0.

    tokens: target ids. parents: places; the root is its own. depths: 0 at the root. scores: log-probability of the path
    from the root, nats. valid: False where the draft had fewer possible candidates than the tree has places.
    sees: whether the node (row) is the other node (column) or descends from it.
    """

    tokens: Int32[Array, "b n"]
    parents: Int32[Array, "b n"]
    depths: Int32[Array, "b n"]
    scores: Float32[Array, "b n"]
    valid: Bool[Array, "b n"]
    sees: Bool[Array, "b n n"]


class _Frontier(NamedTuple):
    """The nodes that get children next. rows: places of their parents in the frontier before."""

    tokens: Int32[Array, "b k"]
    scores: Float32[Array, "b k"]
    records: Int32[Array, "b k"]
    rows: Int32[Array, "b k"]


Expand = Callable[[Array, Array, Array, Any], tuple[Array, Any]]
"""One pass of the draft over a frontier: (level, tokens (b, k), rows (b, k), carry) -> (log-probabilities (b, k, Vd) of
what follows each token, carry). The nodes have depth `level + 1`; their parents stood at `rows` in the frontier before.
"""


def bare_root(tokens: Int32[Array, " b"]) -> Tree:
    """The tree without a draft."""
    zeros = jnp.zeros((*tokens.shape, 1), jnp.int32)
    yes = jnp.ones(zeros.shape, bool)
    return Tree(tokens[:, None], zeros, zeros, zeros.astype(jnp.float32), yes, yes[..., None])


def grow(
    settings: TreeSettings,
    root: Int32[Array, " b"],
    log_q: Float32[Array, "b Vd"],
    vocabulary: Int[Array, " Vd"],
    expand: Expand,
    carry: Any,
) -> Tree:
    """Drafts a tree.

    Args:
      root: target ids of the last tokens.
      log_q: the draft's log-probabilities of what follows them; NaN counts as impossible.
      vocabulary: target ids of the draft's tokens; at least `top_k`.
      expand: see `Expand`. carry: what it is given in the first call.
    """
    batch, k = root.shape[0], settings.top_k

    def children(log_q: Float32[Array, "b f Vd"], scores: Float32[Array, "b f"]):
        """Tokens and scores of the k best children of each node, `(b, f * k)`."""
        best, ids = jax.lax.top_k(jnp.where(log_q <= 0, log_q, -jnp.inf), k)
        return vocabulary[ids].astype(jnp.int32).reshape(batch, -1), (scores[:, :, None] + best).reshape(batch, -1)

    def grow_level(state: tuple[_Frontier, Any], level: Int32[Array, ""]):
        frontier, carry = state
        log_q, carry = expand(level, frontier.tokens, frontier.rows, carry)
        tokens, scores = children(log_q, frontier.scores)
        best, places = jax.lax.top_k(scores, k)
        made_before = 1 + k + level * k * k
        chosen = _Frontier(jnp.take_along_axis(tokens, places, axis=1), best, made_before + places, places // k)
        return (chosen, carry), (tokens, scores, jnp.repeat(frontier.records, k, axis=1))

    zeros = jnp.zeros((batch, 1), jnp.int32)
    tokens, scores = children(log_q[:, None], jnp.zeros((batch, 1), jnp.float32))
    nowhere = jnp.zeros((batch, k), jnp.int32)
    records = nowhere + jnp.arange(1, k + 1, dtype=jnp.int32)[None]
    start = _Frontier(tokens, scores, records, nowhere), carry
    _, later = jax.lax.scan(grow_level, start, jnp.arange(settings.depth - 1, dtype=jnp.int32))
    tokens_br, scores_br, parents_br = (
        jnp.concatenate([root, first, jnp.moveaxis(rest, 0, 1).reshape(batch, -1)], axis=1)
        for root, first, rest in zip(
            (root[:, None], zeros.astype(jnp.float32), zeros), (tokens, scores, nowhere), later, strict=True
        )
    )
    return rerank(settings, tokens_br, scores_br, parents_br)


def rerank(
    settings: TreeSettings, tokens: Int32[Array, "b R"], scores: Float32[Array, "b R"], parents: Int32[Array, "b R"]
) -> Tree:
    """The tree of the best candidates, the root being the first; in the order in which they were made."""
    chosen = jnp.sort(jax.lax.top_k(scores, settings.nodes)[1], axis=1)
    tokens, scores, parents = (jnp.take_along_axis(x, chosen, axis=1) for x in (tokens, scores, parents))
    parents = jax.vmap(jnp.searchsorted)(chosen, parents).astype(jnp.int32)
    sees = _ancestors(parents, settings.levels)
    return Tree(tokens, parents, jnp.sum(sees, axis=2, dtype=jnp.int32) - 1, scores, scores > -jnp.inf, sees)


def _ancestors(parents: Int32[Array, "b n"], levels: int) -> Bool[Array, "b n n"]:
    """A node sees itself and what its parent sees."""
    itself = jnp.broadcast_to(jnp.eye(parents.shape[1], dtype=bool)[None], (*parents.shape, parents.shape[1]))
    return jax.lax.fori_loop(
        1, levels, lambda _, sees: itself | jnp.take_along_axis(sees, parents[:, :, None], axis=1), itself
    )
