"""Acceptance of trained drafts on the held-out examples, row by row: differences of drafts are then paired."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from layerwave.drafts import Draft, Examples, UnrollSettings, supervise, unroll
from layerwave.errors import LayerwaveError
from layerwave.selection.acceptance import clustered_error
from layerwave.targets import Target


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Acceptance of M drafts on R rows of held-out examples, at temperature 1 and the first drafted token."""

    overlap: Float[np.ndarray, "M R"]
    """`Σ_v min(p, q)` summed over the asked slots of each row."""
    asked: Int[np.ndarray, " R"]
    """Asked slots of each row: their tokens are in the loss mask."""

    @property
    def value(self) -> Float[np.ndarray, " M"]:
        """Probability that the target accepts a draft's token, 0 … 1."""
        return self.overlap.sum(axis=1) / self.asked.sum()

    def difference(self, i: int, j: int) -> tuple[float, float | None]:
        """Acceptance of draft i minus that of draft j, and its standard error, paired over rows; None of one row."""
        apart = self.overlap[[i]] - self.overlap[[j]]
        error = float(clustered_error(apart, self.asked)[0]) if len(self.asked) > 1 else None
        return float(apart.sum() / self.asked.sum()), error


def held_out_acceptance(
    target: Target,
    drafts: Sequence[Draft],
    held_out: Examples,
    length: int,
    *,
    packed: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> HeldOut:
    """Acceptance of drafts of one vocabulary on the rows that the held-out examples make.

    Args:
        length: tokens of a row, and of the longest example. packed: as many examples in a row as fit.
        progress: called with rows done and rows in all.

    Raises:
        LayerwaveError: no held-out example.
    """
    from layerwave.drafts.loader import Rows  # and with it grain, which takes long to import
    from layerwave.drafts.stacks import observe, union

    if not len(held_out):
        raise LayerwaveError("no held-out examples to compare drafts on: pass a greater held_out")
    layers = union([draft.config.layers for draft in drafts])
    places = {layer: place for place, layer in enumerate(layers)}
    vocabulary = jnp.asarray(drafts[0].vocabulary.tokens)
    target_def, target_params = nnx.split(target.decoder)
    head, embedding = target.decoder.head_weight(), target.decoder.embed_tokens.embedding[...]
    modules = [(*nnx.split(draft.module), jnp.array([places[l] for l in draft.config.layers])) for draft in drafts]
    rows = Rows.lay(held_out, length, packed=packed)
    found = np.zeros((len(rows.plan), 2, len(drafts)))
    for row in range(len(rows.plan)):
        batch = rows.batch([row])
        observed = observe(target_def, target_params, batch, jnp.array(layers))
        supervision = _supervise(observed.normed, head, vocabulary)
        shared = (batch, observed.states, supervision, embedding, vocabulary)
        found[row] = np.transpose([_counted(graphdef, params, slots, *shared) for graphdef, params, slots in modules])
        if progress is not None:
            progress(row + 1, len(rows.plan))
    return HeldOut(found[:, 0].T, found[:, 1, 0].astype(np.int64))


_supervise = jax.jit(supervise)


@partial(jax.jit, static_argnames="graphdef")
def _counted(graphdef, params, slots, *shared) -> Float[Array, "2"]:
    """Sum of the overlap over the asked slots, and their number; drafts of one width compile once."""
    _, sums = unroll(graphdef, params, slots, *shared, UnrollSettings(steps=1))
    return jnp.array([sums.overlap[0], sums.asked[0]])
