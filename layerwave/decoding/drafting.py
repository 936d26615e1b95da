"""The draft at work beside its target: its cache, and how a round's tree comes about.

Slot t of the cache holds the draft's key for the embedding of token t + 1 and the features of position t. Slots of
verified positions come from the target's states; those behind them are scratch, where a round keeps the keys of the
nodes that it expands, which read the draft's own features.

Letters: `b` sequences, `k` nodes of a frontier, `L` slots, `S` cache slots, `N` target layers, `D`/`d` widths of
target/draft, `K` key heads, `V`/`Vd` tokens of target/draft.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from layerwave.decoding.tree import Tree, TreeSettings, cache_mask, grow
from layerwave.drafts import DraftConfig, Eagle3
from layerwave.targets import KVCache
from layerwave.targets.decoder import masked_attention


class DraftState(NamedTuple):
    """out: the block's output in the last verified slot, from which the tree's first level follows."""

    out: Float[Array, "b d"]
    keys: Float[Array, "b S K head_dim"]
    values: Float[Array, "b S K head_dim"]

    @classmethod
    def empty(cls, config: DraftConfig, batch: int, slots: int, dtype: DTypeLike) -> "DraftState":
        cache = KVCache.empty(config.layer_config(), batch, slots, dtype)
        return cls(jnp.zeros((batch, config.hidden_size), dtype), cache.keys[0], cache.values[0])


class _Walk(NamedTuple):
    """What the passes over frontiers hand on: outputs of the last one, the cache, and the scratch slots it sees."""

    out: Float[Array, "b k d"]
    keys: Float[Array, "b S K head_dim"]
    values: Float[Array, "b S K head_dim"]
    sees: Bool[Array, "b k scratch"]


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
        start: Int32[Array, " b"],
        counts: Int32[Array, " b"],
    ) -> DraftState:
        """Takes in verified positions.

        Args:
          states: the target's, of all layers, at L positions. tokens: what follows each of them.
          start: the first position. counts: how many of the L count; the others' keys are overwritten later.
        """
        features = self.module.fuse(states[self.layers])
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        causal = jnp.broadcast_to((order[None, :] <= order[:, None])[None], (*tokens.shape, len(order)))
        mask = cache_mask(causal, start, state.keys.shape[1])
        out, keys, values = self._pass(state, tokens, features, start[:, None] + order[None], mask, start)
        last = jnp.maximum(counts - 1, 0)
        return DraftState(jnp.take_along_axis(out, last[:, None, None], axis=1)[:, 0], keys, values)

    def propose(
        self, state: DraftState, root: Int32[Array, " b"], length: Int32[Array, " b"], settings: TreeSettings
    ) -> tuple[Tree, DraftState]:
        """Grows a tree behind the `length` verified positions; `root` is the token at the next one."""
        batch, k = root.shape[0], settings.top_k
        scratch = jnp.arange(k * (settings.depth - 1), dtype=jnp.int32)

        def expand(level: Array, tokens: Array, rows: Array, walk: _Walk) -> tuple[Array, _Walk]:
            features = self.module.feedback(jnp.take_along_axis(walk.out, rows[:, :, None], axis=1))
            itself = scratch[None, :] == level * k + jnp.arange(k, dtype=jnp.int32)[:, None]
            sees = jnp.take_along_axis(walk.sees, rows[:, :, None], axis=1) | itself[None]
            mask = cache_mask(sees, length, walk.keys.shape[1])
            positions = jnp.broadcast_to((length + level)[:, None], tokens.shape)
            walk = _Walk(*self._pass(walk, tokens, features, positions, mask, length + level * k), sees)
            return self._log_q(walk.out), walk

        out = jnp.broadcast_to(state.out[:, None], (batch, k, state.out.shape[1]))
        walk = _Walk(out, state.keys, state.values, jnp.zeros((batch, k, len(scratch)), bool))
        log_q = self._log_q(state.out[:, None])[:, 0]
        tree, walk = grow(settings, root, log_q, self.vocabulary, expand, walk)
        return tree, DraftState(state.out, walk.keys, walk.values)

    def _log_q(self, out: Float[Array, "b k d"]) -> Float32[Array, "b k Vd"]:
        return jax.nn.log_softmax(self.module.logits(out), axis=-1)

    def _pass(self, cache: DraftState | _Walk, tokens, features, positions, mask, write):
        """The block's outputs, and the cache's keys and values with the new ones from slot `write` on."""
        attention = masked_attention(mask, (cache.keys, cache.values, write))
        out, (keys, values) = self.module.block(self.embedding[tokens], features, positions, attention)
        return out, keys, values
