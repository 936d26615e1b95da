"""Many drafts on one target pass: one jitted step that observes the target once and updates every draft.

Drafts that read equally many layers have parameters of equal shapes. They are one stack, and each of them sees the same
batch, is clipped by its own norm and has its own moments.

Letters: `W` drafts of a stack, `b` rows, `T` slots, `U` layers in the union of all sets, `J` steps of the training-time
test.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from layerwave.drafts.eagle3 import Draft, initial_draft
from layerwave.drafts.loader import Batch, attention_mask
from layerwave.drafts.unroll import UnrollSettings, UnrollSums, supervise, unroll
from layerwave.drafts.vocabulary import DraftVocabulary
from layerwave.targets import Target


class Stack(NamedTuple):
    """Static: the drafts of one width. members: their places among the run's sets; slots: their layers in the union."""

    graphdef: nnx.GraphDef
    members: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


class StackState(NamedTuple):
    """Parameters and optimiser moments of a stack; every array has the drafts as its first axis."""

    params: nnx.State
    moments: optax.OptState


class Observed(NamedTuple):
    """What the drafts learn from: outputs of the union of their layers, and the final-normed states."""

    states: Float[Array, "U b T D"]
    normed: Float[Array, "b T D"]


class Report(NamedTuple):
    """What leaves a step. `sound`: loss and gradient are finite; a draft of which that is not true stays as it was."""

    loss: Float32[Array, " W"]
    norm: Float32[Array, " W"]
    sound: Bool[Array, " W"]
    sums: UnrollSums


class Optimiser(NamedTuple):
    """Static: AdamW after a clip of the global norm; the learning rate rises from 0, then falls to 0 along a cosine.

    Arithmetic of optax mixes integer and float scalars, which needs JAX's standard promotion.
    """

    learning_rate: float
    warmup_steps: int
    steps: int
    clip: float
    weight_decay: float

    @property
    def schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, self.warmup_steps, self.steps)

    @property
    def transformation(self) -> optax.GradientTransformation:
        adamw = optax.adamw(self.schedule, b1=0.9, b2=0.95, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)

    def update(self, grads: nnx.State, state: StackState) -> StackState:
        """One draft's parameters and moments after a step."""
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = self.transformation.update(grads, state.moments, state.params)
            return StackState(optax.apply_updates(state.params, updates), moments)


def union(layer_sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Layers that any of the sets reads, ascending."""
    return tuple(sorted(set().union(*layer_sets)))


def initial_stacks(
    target: Target,
    layer_sets: Sequence[tuple[int, ...]],
    vocabulary: DraftVocabulary,
    optimiser: Optimiser,
    *,
    seed: int = 0,
    **options: Any,
) -> tuple[tuple[Stack, ...], tuple[StackState, ...], tuple[Draft, ...]]:
    """The untrained drafts, alone and stacked. All start from one seed, so each starts as it would alone.

    `options`: fields of `DraftConfig` that shall not be the target's.
    """
    key = jax.random.key(seed)
    drafts = tuple(initial_draft(target, layers, vocabulary, key, **options) for layers in layer_sets)
    place = {layer: slot for slot, layer in enumerate(union(layer_sets))}
    stacks, states = [], []
    for width in sorted({len(layers) for layers in layer_sets}):
        members = tuple(i for i, layers in enumerate(layer_sets) if len(layers) == width)
        modules = [nnx.split(drafts[i].module) for i in members]
        params = jax.tree.map(lambda *x: jnp.stack(x), *(params for _, params in modules))
        slots = tuple(tuple(place[layer] for layer in drafts[i].config.layers) for i in members)
        stacks.append(Stack(modules[0][0], members, slots))
        states.append(StackState(params, jax.vmap(optimiser.transformation.init)(params)))
    return tuple(stacks), tuple(states), drafts


@partial(jax.jit, static_argnames="target_def")
def observe(target_def: nnx.GraphDef, target_params: nnx.State, batch: Batch, layers: Int[Array, " U"]) -> Observed:
    """One target pass over a batch; each document attends to itself alone."""
    decoder = nnx.merge(target_def, target_params)
    longest = jnp.max(batch.positions, axis=1) + 1
    out = decoder(batch.tokens, positions=batch.positions, mask=attention_mask(batch.documents), lengths=longest)
    return Observed(out.states[layers], out.normed)


def _shared(target_def, target_params, batch, observed, layers, vocabulary) -> tuple:
    """The arguments of `unroll` that all drafts share."""
    decoder = nnx.merge(target_def, target_params)
    observed = observe(target_def, target_params, batch, layers) if observed is None else observed
    supervision = supervise(observed.normed, decoder.head_weight(), vocabulary)
    return batch, observed.states, supervision, decoder.embed_tokens.embedding[...], vocabulary


@partial(jax.jit, static_argnames=("target_def", "stacks", "settings", "optimiser"), donate_argnames="states")
def train_step(
    target_def: nnx.GraphDef,
    target_params: nnx.State,
    stacks: tuple[Stack, ...],
    states: tuple[StackState, ...],
    batch: Batch,
    observed: Observed | None,
    layers: Int[Array, " U"],
    vocabulary: Int[Array, " Vd"],
    settings: UnrollSettings,
    optimiser: Optimiser,
) -> tuple[tuple[StackState, ...], tuple[Report, ...]]:
    """One optimiser step of every draft. `observed`: what was stored of the target's pass; None runs the target."""
    shared = _shared(target_def, target_params, batch, observed, layers, vocabulary)

    def one(graphdef, state: StackState, slots) -> tuple[StackState, Report]:
        loss_of = jax.value_and_grad(unroll, argnums=1, has_aux=True)
        (loss, sums), grads = loss_of(graphdef, state.params, slots, *shared, settings)
        norm = optax.tree.norm(grads)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        updated = optimiser.update(grads, state)
        kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, state)
        return kept, Report(loss, norm, sound, sums)

    results = [
        _over(partial(one, stack.graphdef), state, jnp.array(stack.slots))
        for stack, state in zip(stacks, states, strict=True)
    ]
    return tuple(state for state, _ in results), tuple(report for _, report in results)


@partial(jax.jit, static_argnames=("target_def", "stacks", "settings"))
def evaluation_step(
    target_def: nnx.GraphDef,
    target_params: nnx.State,
    stacks: tuple[Stack, ...],
    states: tuple[StackState, ...],
    batch: Batch,
    observed: Observed | None,
    layers: Int[Array, " U"],
    vocabulary: Int[Array, " Vd"],
    settings: UnrollSettings,
) -> tuple[UnrollSums, ...]:
    """Sums of every draft over one batch, without an update."""
    shared = _shared(target_def, target_params, batch, observed, layers, vocabulary)
    return tuple(
        _over(
            lambda params, slots, graphdef=stack.graphdef: unroll(graphdef, params, slots, *shared, settings)[1],
            state.params,
            jnp.array(stack.slots),
        )
        for stack, state in zip(stacks, states, strict=True)
    )


def _over(function, stacked, slots):
    return jax.vmap(function)(stacked, slots)
