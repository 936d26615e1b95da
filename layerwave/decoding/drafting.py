"""The draft at work beside its target: its cache, and how a round's tree comes about.

Slot t of the cache holds the draft's key for the embedding of token t + 1 and the features of position t, from the
target's states at verified positions. The keys of the nodes that a round expands, which read the draft's own features,
live as long as the round.

Letters: `b` sequences, `k` nodes of a frontier, `L` slots, `S` cache slots, `N` target layers, `D`/`d` widths of
target/draft, `K` key heads, `V`/`Vd` tokens of target/draft.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from layerwave.decoding.tree import Tree, TreeSettings, grow
from layerwave.drafts import DraftConfig, Eagle3
from layerwave.targets import KVCache
from layerwave.targets.decoder import Keys, masked_attention


class DraftState(NamedTuple):
    """out: the block's output in the last verified slot, from which the tree's first level follows. cache: of the one
    layer."""

    out: Float[Array, "b d"]
    cache: KVCache

    @classmethod
    def empty(cls, config: DraftConfig, batch: int, slots: int, dtype: DTypeLike) -> "DraftState":
        cache = KVCache.empty(config.layer_config(), batch, slots, dtype)
        return cls(jnp.zeros((batch, config.hidden_size), dtype), cache)


class _Walk(NamedTuple):
    """What the passes over frontiers hand on: outputs of the last one, and keys and values of all nodes expanded, with
    those of them that each node of the last frontier sees."""

    out: Float[Array, "b k d"]
    keys: Float[Array, "b expanded K head_dim"]
    values: Float[Array, "b expanded K head_dim"]
    sees: Bool[Array, "b k expanded"]


@dataclass(frozen=True)
class Drafter:
    """A draft with what it reads of its target: numbers of layers, ids of its vocabulary, the embedding table."""

    module: Eagle3
    layers: Int[Array, " m"]
    vocabulary: Int[Array, " Vd"]
    embedding: Float[Array, "V d"]

    def follow(
        self,
        state: DraftState,
        states: Float[Array, "N b L D"],
        tokens: Int32[Array, "b L"],
        counts: Int32[Array, " b"],
    ) -> DraftState:
        """Takes in verified positions.

        Args:
          states: the target's, of all layers, at L positions. tokens: what follows each of them.
          counts: how many of the L count; the others' keys are overwritten later.
        """
        features = self.module.fuse(states[self.layers])
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        causal = jnp.broadcast_to(order <= order.T, (*tokens.shape, tokens.shape[1]))
        positions = state.cache.length[:, None] + order
        out, (keys, values) = self._pass(tokens, features, positions, causal, _verified(state.cache))
        last = jnp.maximum(counts - 1, 0)
        out = jnp.take_along_axis(out, last[:, None, None], axis=1)[:, 0]
        return DraftState(out, state.cache.extended(keys[None], values[None], counts))

    def propose(self, state: DraftState, root: Int32[Array, " b"], settings: TreeSettings) -> Tree:
        """Grows a tree behind the verified positions; `root` is the token at the next one."""
        batch, k = root.shape[0], settings.top_k
        nodes = k * max(1, settings.depth - 1)  # at depth 1 none is expanded, but one level is traced
        verified = _verified(state.cache)
        itself = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (batch, k, k))

        def expand(level: Array, tokens: Array, rows: Array, walk: _Walk) -> tuple[Array, _Walk]:
            features = self.module.feedback(jnp.take_along_axis(walk.out, rows[:, :, None], axis=1))
            sees = jnp.take_along_axis(walk.sees, rows[:, :, None], axis=1)
            positions = jnp.broadcast_to((state.cache.length + level)[:, None], tokens.shape)
            path = Keys(walk.keys, walk.values, sees)
            out, new = self._pass(tokens, features, positions, itself, verified, path)
            keys, values, sees = (
                jax.lax.dynamic_update_slice_in_dim(held, fresh, level * k, axis)
                for held, fresh, axis in zip((walk.keys, walk.values, sees), (*new, itself), (1, 1, 2), strict=True)
            )
            return self._log_q(out), _Walk(out, keys, values, sees)

        out = jnp.broadcast_to(state.out[:, None], (batch, k, state.out.shape[1]))
        blank = jnp.zeros((batch, nodes, *verified.keys.shape[2:]), verified.keys.dtype)
        walk = _Walk(out, blank, blank, jnp.zeros((batch, k, nodes), bool))
        log_q = self._log_q(state.out[:, None])[:, 0]
        return grow(settings, root, log_q, self.vocabulary, expand, walk)

    def _log_q(self, out: Float[Array, "b k d"]) -> Float32[Array, "b k Vd"]:
        return jax.nn.log_softmax(self.module.logits(out), axis=-1)

    def _pass(self, tokens, features, positions, mask, *before: Keys):
        """The block's outputs, and the tokens' keys and values."""
        return self.module.block(self.embedding[tokens], features, positions, masked_attention(mask, *before))


def _verified(cache: KVCache) -> Keys:
    return Keys(cache.keys[0], cache.values[0], cache.filled)
