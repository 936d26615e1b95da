"""Decoding of prompts in batches, plain or with a draft.

The tokens are the target's own either way; a draft only makes them come several a round. Sequences of a batch have
their own lengths, samples and stops. Caches have a power of two of slots and grow when one sequence needs more, so
compilations are bounded by the logarithm of the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Int64, Key

from layerwave.decoding.drafting import DraftState
from layerwave.decoding.rounds import Plan, Request, State, Weights, one_round, prefill, rounds
from layerwave.decoding.sampling import GenerationSettings
from layerwave.decoding.tree import Tree, TreeSettings
from layerwave.drafts import Draft
from layerwave.errors import LayerwaveError
from layerwave.targets import Decoder, KVCache

_LEAST = 64
"""Cache slots and padded prompts begin with this many tokens and double from there."""

Prompts = Sequence[Sequence[int] | Int[np.ndarray, " _"]] | Int[np.ndarray, "b T"]
Stop = Literal["end_token", "max_new_tokens", "context"]


@dataclass(frozen=True, eq=False)
class Continuation:
    """The answer to a prompt, and how it came about.

    The first token comes from the prompt's pass; each later one was made in a verification round.
    """

    tokens: tuple[int, ...]
    """New tokens, the end token included where it was reached."""
    stop: Stop
    """Why there are no more; `context`: the target has no positions left."""
    accepted: Int64[np.ndarray, " L"]
    """Numbers of rounds in which 0, 1, … drafted tokens were kept; those behind an end token or limit are not."""
    drafted: int
    """Tokens proposed in all rounds."""

    @property
    def rounds(self) -> int:
        """Passes of the target after the prompt's."""
        return int(self.accepted.sum())

    @property
    def emitted(self) -> int:
        """Tokens made in rounds, the bonus tokens counted: τ is the sum of these over the sum of `rounds`."""
        return len(self.tokens) - 1


def decode(
    decoder: Decoder,
    prompts: Prompts,
    settings: GenerationSettings,
    key: Key[Array, ""] | Key[Array, " b"],
    draft: Draft | None = None,
    tree: TreeSettings | None = None,
) -> list[Continuation]:
    """Continues each prompt until an end token, `max_new_tokens`, or the end of the target's context.

    Whatever the draft, greedy answers are those of plain decoding, and so are sampled ones from the same key; as far as
    rounding goes, since passes over more tokens at once may sum in another order.

    Args:
      key: one a prompt, or one for all, which is split among them by their places.
      draft: None decodes plainly.
      tree: by default `TreeSettings()`.

    Raises:
      LayerwaveError: no prompt, an empty one, one with a token outside the target's vocabulary, or one that leaves no
        position for an answer; an end token outside the vocabulary; a draft that does not fit target or tree.
    """
    plan, weights, request, state = _begin(decoder, prompts, settings, key, draft, tree)
    state = rounds(plan, weights, request, state)
    while not state.done.all():
        slots = _slots(plan, decoder, int(state.cache.length.max()))
        state = rounds(plan, weights, request, state.widened(slots))
    return _continuations(state, np.asarray(request.prompts), settings)


def draft_round(
    decoder: Decoder,
    prompt: Sequence[int],
    settings: GenerationSettings,
    key: Key[Array, ""],
    draft: Draft,
    tree: TreeSettings | None = None,
) -> tuple[Tree, tuple[int, ...]]:
    """The first tree behind a prompt, to look at, and the nodes of the path that was accepted, the root included.

    Raises:
      LayerwaveError: what `decode` refuses.
    """
    plan, weights, request, state = _begin(decoder, [prompt], settings, key, draft, tree)
    _, grown, verdict = one_round(plan, weights, request, state)
    return grown, tuple(verdict.path[0, : int(verdict.accepted[0]) + 1].tolist())


def _begin(
    decoder: Decoder,
    prompts: Prompts,
    settings: GenerationSettings,
    key: Key[Array, ""] | Key[Array, " b"],
    draft: Draft | None,
    tree: TreeSettings | None,
) -> tuple[Plan, Weights, Request, State]:
    """Everything on the device, with the prompts taken in."""
    check_prompts(decoder, prompts, settings)
    graphdef, params = nnx.split(decoder)
    plan, weights = Plan(graphdef, None, None, settings.sampler), Weights(params, None, None, None)
    if draft is not None:
        tree = tree or TreeSettings()
        _check_draft(decoder, draft, tree)
        module, drafting = nnx.split(draft.module)
        plan = Plan(graphdef, module, tree, settings.sampler)
        layers = jnp.array(draft.config.layers, jnp.int32)
        weights = Weights(params, drafting, layers, jnp.asarray(draft.vocabulary.tokens))

    batch, lengths = len(prompts), np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths.max())
    padded = np.zeros((batch, min(_bucket(longest), decoder.config.max_positions)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    limits = np.minimum(lengths + settings.max_new_tokens, decoder.config.context(lengths)).astype(np.int32)
    keys = jax.random.split(key, batch) if key.ndim == 0 else key
    ends = np.zeros(decoder.config.vocab_size, bool)
    ends[list(settings.end_tokens)] = True
    request = Request(jnp.asarray(lengths), jnp.asarray(limits), keys, jnp.asarray(ends))
    state = _empty(decoder, draft, batch, _slots(plan, decoder, longest), plan.levels)
    return plan, weights, request, prefill(plan, weights, request, state, jnp.asarray(padded))


def _slots(plan: Plan, decoder: Decoder, filled: int) -> int:
    """Slots for a round behind `filled` ones: a power of two, or what the context can ever need."""
    return min(_bucket(filled + plan.margin), decoder.config.max_positions + plan.margin)


def _bucket(length: int) -> int:
    return max(_LEAST, 1 << (length - 1).bit_length())


def _empty(decoder: Decoder, draft: Draft | None, batch: int, slots: int, levels: int) -> State:
    return State(
        cache=KVCache.empty(decoder.config, batch, slots, decoder.dtype),
        draft=None if draft is None else DraftState.empty(draft.config, batch, slots, draft.module.dtype),
        tokens=jnp.zeros((batch, slots), jnp.int32),
        done=jnp.zeros(batch, bool),
        accepted=jnp.zeros((batch, levels), jnp.int32),
        drafted=jnp.zeros(batch, jnp.int32),
    )


def _continuations(state: State, prompts: Int[np.ndarray, " b"], settings: GenerationSettings) -> list[Continuation]:
    ends, accepted, drafted = (np.asarray(x) for x in (state.cache.length + 1, state.accepted, state.drafted))
    found = []
    for row, start, end, *counts in zip(np.asarray(state.tokens), prompts, ends, accepted, drafted, strict=True):
        tokens = tuple(row[start:end].tolist())
        full: Stop = "max_new_tokens" if len(tokens) == settings.max_new_tokens else "context"
        stop: Stop = "end_token" if tokens[-1] in settings.end_tokens else full
        found.append(Continuation(tokens, stop, counts[0].astype(np.int64), int(counts[1])))
    return found


def check_prompts(decoder: Decoder, prompts: Prompts, settings: GenerationSettings) -> None:
    """Raises `LayerwaveError` for prompts and end tokens that `decode` refuses."""
    if len(prompts) == 0 or not all(map(len, prompts)):
        raise LayerwaveError(f"got {len(prompts)} prompts of lengths {[len(p) for p in prompts]}; each needs a token")
    size, positions = decoder.config.vocab_size, decoder.config.max_positions
    outside = next((token for prompt in prompts for token in prompt if not 0 <= token < size), None)
    if outside is not None:
        raise LayerwaveError(
            f"a prompt has the token {outside}, expected 0 to {size - 1}; encode it with the target's own tokenizer"
        )
    for token in settings.end_tokens:
        if not 0 <= token < size:
            raise LayerwaveError(f"end_token is {token}, expected 0 to {size - 1}; take the target's own tokenizer's")
    longest = max(map(len, prompts))
    if longest >= positions:
        raise LayerwaveError(
            f"a prompt has {longest} tokens, and the target's {positions} positions leave none to answer: shorten it"
        )


def _check_draft(decoder: Decoder, draft: Draft, tree: TreeSettings) -> None:
    config, target = draft.config, decoder.config
    wanted = (config.num_target_layers, config.target_hidden_size, config.hidden_size, config.vocab_size)
    given = (target.num_layers, target.hidden_size, target.hidden_size, target.vocab_size)
    if wanted != given:
        raise LayerwaveError(
            f"the draft wants a target of (layers, width, width of the embedding, vocabulary) {wanted}, got one of "
            f"{given}: load the target that it was trained for"
        )
    if tree.top_k > draft.vocabulary.size:
        raise LayerwaveError(
            f"top_k of the tree is {tree.top_k}, but the draft has only {draft.vocabulary.size} tokens: lower top_k"
        )
