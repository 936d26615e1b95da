"""Rounds of decoding on the device, with and without a draft.

A round drafts a tree behind the last token, runs the target over it in one pass, keeps what verification accepts, and
moves both caches on. It is one compiled function of static shapes in a `while_loop`: its cost depends on the number of
cache slots, not on how many of them are filled. Without a draft the tree is the root alone and a round makes one token.

Letters: `b` sequences, `n` nodes, `L` levels of the tree, `T` prompt tokens, `S` cache slots, `N` layers, `D` features.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int, Int32, Key

from layerwave.decoding.drafting import Drafter, DraftState
from layerwave.decoding.sampling import Sampler
from layerwave.decoding.tree import Tree, TreeSettings, bare_root
from layerwave.decoding.verify import Verdict, verify
from layerwave.targets import Decoder, KVCache


@dataclass(frozen=True)
class Plan:
    """What is static in a compiled round. draft, tree: None in plain decoding."""

    target: nnx.GraphDef
    draft: nnx.GraphDef | None
    tree: TreeSettings | None
    sampler: Sampler

    @property
    def levels(self) -> int:
        """Tokens that a round makes at most."""
        return 1 if self.tree is None else self.tree.levels

    @property
    def margin(self) -> int:
        """Slots that a round needs behind those that are filled."""
        return self.levels + 1


class Weights(NamedTuple):
    """Parameters of target and draft, layers that the draft reads, target ids of its vocabulary."""

    target: nnx.State
    draft: nnx.State | None
    layers: Int32[Array, " m"] | None
    vocabulary: Int32[Array, " Vd"] | None


class Request(NamedTuple):
    """prompts: numbers of tokens. limits: of prompt and answer together. keys: of the samples. ends: whether a token
    ends an answer."""

    prompts: Int32[Array, " b"]
    limits: Int32[Array, " b"]
    keys: Key[Array, " b"]
    ends: Bool[Array, " V"]


class State(NamedTuple):
    """Where each sequence stands. It has `cache.length + 1` tokens: the last is the root of the next tree.

    done: it has an end token or is at its limit. accepted: numbers of rounds by accepted tokens. drafted: valid nodes.
    """

    cache: KVCache
    draft: DraftState | None
    tokens: Int32[Array, "b S"]
    done: Bool[Array, " b"]
    accepted: Int32[Array, "b L"]
    drafted: Int32[Array, " b"]

    def widened(self, slots: int) -> "State":
        """The same with more slots."""
        draft = None if self.draft is None else self.draft._replace(cache=self.draft.cache.widened(slots))
        tokens = jnp.pad(self.tokens, ((0, 0), (0, slots - self.tokens.shape[1])))
        return self._replace(cache=self.cache.widened(slots), draft=draft, tokens=tokens)


@partial(jax.jit, static_argnums=0)
def prefill(plan: Plan, weights: Weights, request: Request, state: State, prompts: Int[Array, "b T"]) -> State:
    """Takes in the prompts, right-padded, and makes the first token of each answer. `state` has nothing in it yet."""
    decoder, drafter = _models(plan, weights)
    zeros = state.cache.length
    output = decoder(prompts, cache=KVCache.empty(decoder.config, prompts.shape[0], 0, decoder.dtype))
    # Slots of padding lie behind each sequence's length: hidden by the mask until real tokens overwrite them.
    cache = state.cache.extended(output.keys, output.values, request.prompts)
    last = jnp.take_along_axis(output.normed, request.prompts[:, None, None] - 1, axis=1)[:, 0]
    first = plan.sampler.draw(decoder.logits(last), request.keys, zeros)[:, None]
    draft = state.draft
    if drafter is not None:
        following = _write(jnp.roll(prompts, -1, axis=1), first, request.prompts - 1)
        draft = drafter.follow(draft, output.states, following, request.prompts)
    tokens = _write(_write(state.tokens, prompts, zeros), first, request.prompts)
    done = request.ends[first[:, 0]] | (request.prompts + 1 >= request.limits)
    return State(cache, draft, tokens, done, state.accepted, state.drafted)


@partial(jax.jit, static_argnums=0)
def rounds(plan: Plan, weights: Weights, request: Request, state: State) -> State:
    """Goes on until all sequences are done, or one has not enough slots left for another round."""
    models, slots = _models(plan, weights), state.tokens.shape[1]

    def going(state: State) -> Bool[Array, ""]:
        return ~jnp.all(state.done) & jnp.all(state.cache.length + plan.margin <= slots)

    return jax.lax.while_loop(going, lambda state: _round(plan, *models, request, state)[0], state)


@partial(jax.jit, static_argnums=0)
def one_round(plan: Plan, weights: Weights, request: Request, state: State) -> tuple[State, Tree, Verdict]:
    """A single round, to look at."""
    return _round(plan, *_models(plan, weights), request, state)


def _round(
    plan: Plan, decoder: Decoder, drafter: Drafter | None, request: Request, state: State
) -> tuple[State, Tree, Verdict]:
    length, draft = state.cache.length, state.draft
    root = jnp.take_along_axis(state.tokens, length[:, None], axis=1)[:, 0]
    tree = bare_root(root) if drafter is None else drafter.propose(draft, root, plan.tree)
    output = decoder(tree.tokens, positions=length[:, None] + tree.depths, mask=tree.sees, cache=state.cache)
    places = length + 1 - request.prompts
    verdict = verify(tree, decoder.logits(output.normed), plan.levels, plan.sampler, request.keys, places)

    # Of an end token or the limit in the midst of the accepted ones: what is behind it was never made.
    counts, ended = _until_end(request, verdict.tokens, verdict.accepted + 1)
    room = request.limits - (length + 1)
    counts, ended = jnp.minimum(counts, room), ended & (counts <= room)
    counts = jnp.where(state.done, 0, counts)

    path = verdict.path[None, :, :, None]
    if drafter is not None:
        states = jnp.take_along_axis(output.states, path, axis=2)
        draft = drafter.follow(draft, states, verdict.tokens, counts)
    kept = jnp.minimum(verdict.accepted, counts)[:, None] == jnp.arange(plan.levels, dtype=jnp.int32)[None]
    active = (~state.done).astype(jnp.int32)
    keys, values = (jnp.take_along_axis(x, path[..., None], axis=2) for x in (output.keys, output.values))
    state = State(
        cache=state.cache.extended(keys, values, counts),
        draft=draft,
        tokens=_write(state.tokens, verdict.tokens, length + 1),
        done=state.done | ended | (counts == room),
        accepted=state.accepted + active[:, None] * kept.astype(jnp.int32),
        drafted=state.drafted + active * (jnp.sum(tree.valid, axis=1, dtype=jnp.int32) - 1),
    )
    return state, tree, verdict


def _models(plan: Plan, weights: Weights) -> tuple[Decoder, Drafter | None]:
    decoder = nnx.merge(plan.target, weights.target)
    if plan.draft is None:
        return decoder, None
    module = nnx.merge(plan.draft, weights.draft)
    return decoder, Drafter(module, weights.layers, weights.vocabulary, decoder.embed_tokens.embedding[...])


def _write(buffer: Array, new: Array, start: Int32[Array, " b"]) -> Array:
    """`new (b, L)` in `buffer (b, S)` from slot `start` on."""
    return jax.vmap(jax.lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(buffer, new, start, 0)


def _until_end(
    request: Request, tokens: Int32[Array, "b L"], counts: Int32[Array, " b"]
) -> tuple[Int32[Array, " b"], Bool[Array, " b"]]:
    """How many of the first `counts` tokens stand before or at the first end token, and whether there is one."""
    order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    ends = request.ends[tokens] & (order < counts[:, None])
    ended = ends.any(axis=1)
    return jnp.where(ended, jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, counts), ended
