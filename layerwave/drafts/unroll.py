"""The training-time test (EAGLE-3, arXiv 2503.01840): the draft is trained on its own output, a few steps deep.

In step j slot t takes token t + 1 + j (from the data, not from the draft) and the features that step j - 1 left in the
same slot, and predicts token t + 2 + j. Its query sees the keys of step 0 in slots up to t, which stand for what the
target has verified, and the keys of steps 1 … j in slot t alone, which are the draft's own chain. Rotary positions
advance with the steps. Tokens, the target's distributions and the loss mask shift together: what counts is the mask of
the token that is predicted, and it must lie in the slot's document.

Letters: `b` rows, `T` slots, `J` steps, `U` layers whose states are given, `m` layers that the draft reads, `D`/`d`
widths of target/draft, `V`/`Vd` tokens of target/draft, `H`/`K` query/key heads.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, PyTree

from layerwave.drafts.attention import attend_unrolled
from layerwave.drafts.eagle3 import Eagle3
from layerwave.drafts.loader import Batch, attention_mask
from layerwave.drafts.loss import first_greatest, soft_cross_entropy
from layerwave.errors import LayerwaveError
from layerwave.targets import DTypeName
from layerwave.targets.decoder import matmul_precision


@dataclass(frozen=True)
class UnrollSettings:
    """How a draft is unrolled. Raises `LayerwaveError` for values out of range."""

    steps: int = 7
    decay: float = 0.8
    """Step j weighs decay^j in the loss."""
    mean: Literal["masked", "all"] = "masked"
    """A step's loss is the mean over the slots that it is trained on, or over all b x T (EAGLE, SpecForge)."""
    dtype: DTypeName = "float32"
    """Of activations and products. Softmax, losses and parameters are float32 in any case."""
    remat: bool = True
    """Compute each step again in the backward pass instead of keeping its activations and logits."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.decay <= 1:
            raise LayerwaveError(
                f"steps is {self.steps} and decay {self.decay}: expected at least 1 step and a decay in (0, 1]"
            )


class Supervision(NamedTuple):
    """What the target says after each position, and all that the loss needs of its head.

    probabilities: its next-token distribution renormalised on the draft vocabulary.
    covered: probability of the draft vocabulary before that.
    best: its most probable token, of the whole vocabulary.
    """

    probabilities: Float32[Array, "b T Vd"]
    covered: Float32[Array, "b T"]
    best: Int[Array, "b T"]


def supervise(
    normed: Float[Array, "b T D"], head: Float[Array, "V D"], vocabulary: Int[Array, " Vd"], *, chunk: int = 128
) -> Supervision:
    """The target's next-token distributions from its final-normed states and head, once for all drafts and steps.

    `vocabulary`: target ids of the draft's tokens. Logits and softmax are float32; no `T x V` array stands longer than
    for `chunk` positions. They are cut along T, so that the devices of a mesh keep their rows.
    """
    batch, length, width = normed.shape

    def supervised(normed_bcd) -> Supervision:
        with matmul_precision(normed.dtype):
            logits_bcv = jnp.einsum("bcd,vd->bcv", normed_bcd, head, preferred_element_type=jnp.float32)
        drafted_bcv = logits_bcv[..., vocabulary]
        total_bc, drafted_bc = (jax.nn.logsumexp(x, axis=-1, keepdims=True) for x in (logits_bcv, drafted_bcv))
        return Supervision(
            jnp.exp(drafted_bcv - drafted_bc),
            jnp.exp(drafted_bc - total_bc)[..., 0],
            first_greatest(logits_bcv),
        )

    columns = max(1, chunk // batch)
    pieces = -(-length // columns)
    padded = jnp.pad(normed, ((0, 0), (0, pieces * columns - length), (0, 0)))
    found = jax.lax.map(supervised, jnp.moveaxis(padded.reshape(batch, pieces, columns, width), 1, 0))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :length], found)


class UnrollSums(NamedTuple):
    """Sums over slots, so that batches add up (`jax.tree.map(jnp.add, a, b)`); the properties are the means, 0 (τ: 1)
    where no slot counts.

    Two kinds of slots count in step j. *Asked*: token t + 2 + j is in the loss mask, and of the slot's document.
    *Trained*: asked, and the target's most probable token is in the draft vocabulary (as EAGLE and SpecForge have it;
    speculators trains on all asked ones). In the joint numbers count the slots that are asked in every step.
    """

    loss: Float32[Array, "*n J"]
    """Soft cross-entropy in nats, over trained slots."""
    trained: Float32[Array, "*n J"]
    asked: Float32[Array, "*n J"]
    correct: Float32[Array, "*n J"]
    """Asked slots whose most probable draft token is the target's most probable token of its whole vocabulary."""
    overlap: Float32[Array, "*n J"]
    """Over asked slots, `Σ_v min(p, q)`, p over the target's whole vocabulary: the probability of acceptance at
    temperature 1."""
    complete: Float32[Array, "*n"]
    """Slots that are asked in every step."""
    accepted_greedy: Float32[Array, "*n"]
    """Over complete slots, the number of steps before the first that is not correct."""
    accepted_sampled: Float32[Array, "*n"]
    """Over complete slots, its expectation where step j is accepted with the probability `overlap`."""

    @property
    def losses(self) -> Float32[Array, "*n J"]:
        return self.loss / jnp.maximum(self.trained, 1)

    @property
    def accuracy(self) -> Float32[Array, "*n J"]:
        return self.correct / jnp.maximum(self.asked, 1)

    @property
    def acceptance(self) -> Float32[Array, "*n J"]:
        return self.overlap / jnp.maximum(self.asked, 1)

    @property
    def tau_greedy(self) -> Float32[Array, "*n"]:
        """Expected tokens of a round of J drafted tokens in a chain, the target's own token included: joint over the
        steps of a slot, not a product of means. The chain is fed the data's tokens, so it is exact where the data are
        the target's own greedy answers."""
        return 1 + self.accepted_greedy / jnp.maximum(self.complete, 1)

    @property
    def tau_sampled(self) -> Float32[Array, "*n"]:
        return 1 + self.accepted_sampled / jnp.maximum(self.complete, 1)


def unroll(
    graphdef: nnx.GraphDef,
    params: PyTree[Float[Array, "..."]],
    slots: Int[Array, " m"],
    batch: Batch,
    states: Float[Array, "U b T D"],
    supervision: Supervision,
    embedding: Float[Array, "V d"],
    vocabulary: Int[Array, " Vd"],
    settings: UnrollSettings,
) -> tuple[Float32[Array, ""], UnrollSums]:
    """Loss of one draft on one batch, `Σ_j decay^j · (mean soft cross-entropy of step j)`, and what to report.

    Pure, so drafts that read equally many layers run at once: `jax.vmap` over `params` and `slots`, all else shared.

    Args:
      graphdef, params: `nnx.split(draft.module)`, of float32; cast to `settings.dtype` in every step, so gradients add
        up in float32.
      slots: which of the U given states the draft reads, in ascending order of layers.
      batch: right-padded or packed rows. Tokens with the same number in `documents` are one document, which stands in
        one piece; what is padding must have no loss mask.
      states: outputs of the union of all drafts' layers.
      supervision: from `supervise`.
      embedding: the target's table, not trained.
      vocabulary: target ids of the draft's tokens.
    """
    length, steps, dtype = batch.tokens.shape[1], settings.steps, jnp.dtype(settings.dtype)
    mask = attention_mask(batch.documents)
    drafted = jnp.zeros(embedding.shape[0], bool).at[vocabulary].set(True)
    # Zeros beyond the end of each row: nothing to learn there.
    later, targets = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (0, steps + 1)] + [(0, 0)] * (x.ndim - 2)), (batch, supervision)
    )

    def ahead(x: Array, distance: Int[Array, ""]) -> Array:
        """What stands `distance` tokens later in each row of a padded array."""
        return jax.lax.dynamic_slice_in_dim(x, distance, length, axis=1)

    def draft() -> Eagle3:
        return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), params))

    def step(carry, j: Int[Array, ""]):
        features, keys, values = carry

        def attention(q, k, v):
            held = keys.at[j].set(k), values.at[j].set(v)
            return attend_unrolled(q, *held, mask, j), held

        module, target = draft(), jax.tree.map(lambda x: ahead(x, 1 + j), targets)
        embedded = embedding[ahead(later.tokens, 1 + j)]
        out, held = module.block(embedded, features, batch.positions + j, attention)
        logits = module.logits(out)
        loss, q = soft_cross_entropy(logits, target.probabilities)
        asked = ahead(later.loss_mask, 2 + j) & (ahead(later.documents, 2 + j) == batch.documents)
        # Of a target that is not finite no token is the best: its loss has to show it.
        trained = asked & (drafted[target.best] | jnp.isnan(target.covered))
        loss = jnp.where(trained, loss, 0.0)
        correct = asked & (vocabulary[first_greatest(jax.lax.stop_gradient(logits))] == target.best)
        overlap = jnp.sum(jnp.minimum(target.covered[..., None] * target.probabilities, q), axis=-1)
        overlap = jnp.where(asked, jax.lax.stop_gradient(overlap), 0.0)
        return (module.feedback(out), *held), (loss, trained, asked, correct, overlap)

    module = draft()
    empty = jnp.zeros((steps, *batch.tokens.shape, *module.key_shape), dtype)
    start = module.fuse(states[slots]), empty, empty
    _, found = jax.lax.scan(jax.checkpoint(step) if settings.remat else step, start, jnp.arange(steps, dtype=jnp.int32))
    loss, trained, asked, correct, overlap = (x.astype(jnp.float32) for x in found)
    complete = jnp.prod(asked, axis=0)

    def leading(accepted: Float32[Array, "J b T"]) -> Float32[Array, ""]:
        return jnp.sum(complete * jnp.sum(jnp.cumprod(accepted, axis=0), axis=0))

    sums = UnrollSums(
        *(jnp.sum(x, axis=(1, 2)) for x in (loss, trained, asked, correct, overlap)),
        complete=jnp.sum(complete),
        accepted_greedy=leading(correct),
        accepted_sampled=leading(overlap),
    )
    means = sums.losses if settings.mean == "masked" else sums.loss / batch.tokens.size
    return jnp.sum(means * settings.decay ** jnp.arange(steps, dtype=jnp.float32)), sums
