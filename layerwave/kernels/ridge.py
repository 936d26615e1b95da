"""Predicted acceptance: how often the target would accept the tokens of the best linear draft.

The draft reads the embedding of the next token and the concatenated states of a layer set, and is a ridge regression on
what the target's head reads one token later. Grams add, so that a set costs sums of `n x n` matrices and one Cholesky
factorisation for each `λ` that is tried, at any number of features. `Q` rows are positions: the `n` that fit, the last
`v` of which choose `λ`, then those that score.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from layerwave.errors import LayerwaveError
from layerwave.kernels.precision import AnyArray, widen
from layerwave.kernels.sets import check_sets

HIGHEST = jax.lax.Precision.HIGHEST

RIDGES = 10.0 ** np.arange(3, -6, -1)
"""Grid of `λ` relative to Grams of mean diagonal 2 (states 1, embeddings 1). Descending: of equals the greater wins."""

FIRST = 4
"""Where the climb on `RIDGES` starts: 0.1, near the optimum of every real target measured."""

GAIN = 3e-4
"""Acceptance that each step to a smaller `λ` has to gain: on a plateau rounding would choose."""

PRECISE = 2e-3
"""Relative residual up to which a `λ` may be chosen. In float32 α̂ then errs by less than 1e-4."""

LEADING = 256
"""Components of the targets that choose `λ`. On a 24-layer target of width 896 fewer than all changed α̂ by 6e-4."""

CHECKED = 16
"""Components on which residuals are measured."""


class RidgeProblem(NamedTuple):
    """One fit that all layer sets share. R tokens of the vocabulary, r components of the targets, S scoring samples."""

    grams: Float[Array, "N Q n"]
    """Products of the states of each layer with those at the fitting positions, of mean diagonal 1 there."""
    embedding: Float[Array, "Q n"]
    """The same of the embeddings."""
    targets: Float[Array, "n r"]
    """What the head reads one token later, less its mean, in r orthonormal directions, the leading ones first."""
    head: Float[Array, "R r"]
    """The head in the same directions."""
    offset: Float[Array, " R"]
    """Logits of the mean target."""
    inner: Float[Array, "v R"]
    """The target's distribution at the fitting positions that choose `λ`, the last ones."""
    scored: Float[Array, "Q-n R"]
    """The target's distribution at the scoring positions."""
    top: Int[Array, " Q-n"]
    """The most probable token there."""
    samples: Int[Array, " Q-n"]
    """Which sample each scoring position belongs to."""
    counts: Float[Array, " S"]
    """Scoring positions of each sample."""


class SetAcceptance(NamedTuple):
    """What `set_acceptance` finds of M sets."""

    by_sample: Float[Array, "M S"]
    """Overlap `Σ_v min(p, q̂)`, the probability of acceptance, summed over the positions of each scoring sample."""
    hits: Float[Array, " M"]
    """Scoring positions at which the most probable tokens of target and draft are the same."""
    ridge: Float[Array, " M"]
    """The `λ` that was chosen."""
    at_edge: Bool[Array, " M"]
    """Whether a `λ` beyond `RIDGES`, or below what the precision allows, may be better."""
    residual: Float[Array, " M"]
    """`‖(K + λI) A - Y‖ / ‖Y‖` of the last solve: large or NaN where the precision does not suffice."""


def token_grams(
    states: Float[AnyArray, "N Q W"], fitting: int
) -> tuple[Float[Array, "N Q {fitting}"], Float[Array, " N"]]:
    """Products of each layer's states with those of the first `fitting` rows, of mean diagonal 1 there, and the scale.

    The scale is the mean squared norm of a layer at the fitting rows, by which its products were divided: 0 for a
    layer that is zero there, not finite for one that is not; their products are NaN. float32, float64 in such a
    context. `fitting` is static.
    """
    return _token_grams(states, fitting)


@partial(jax.jit, static_argnames="fitting")
def _token_grams(states: Float[Array, "N Q W"], fitting: int) -> tuple[Float[Array, "N Q n"], Float[Array, " N"]]:
    def of_layer(X: Float[Array, "Q W"]) -> tuple[Float[Array, "Q n"], Float[Array, ""]]:
        X = widen(X)
        scale = jnp.mean(jnp.sum(X[:fitting] ** 2, 1))
        X = X * jax.lax.rsqrt(scale)
        return jnp.einsum("qd,pd->qp", X, X[:fitting], precision=HIGHEST), scale

    return jax.lax.map(of_layer, states)


def set_acceptance(
    problem: RidgeProblem, weights: Float[AnyArray, " N"], sets: Int[AnyArray, "M m"], *, batch: int = 1
) -> SetAcceptance:
    """Predicted acceptance of each set; `weights` are the shares, up to a factor, that layers have in a sum of Grams.

    `batch` sets go through at a time, so that memory does not grow with `M`: 1 on a CPU, more on an accelerator.
    float32, in an x64 context float64. Static: `batch`.

    Raises `LayerwaveError` for an empty set, a batch of fewer than 1 set and, where sets are not traced, for a layer
    out of range or repeated in a set. A singular problem has NaN or a large `residual`.

    Source: ours.
    """
    check_sets(sets, problem.grams.shape[0])
    if batch < 1:
        raise LayerwaveError(f"batch={batch}: expected at least 1 set a batch")
    return _set_acceptance(problem, weights, sets, batch)


@partial(jax.jit, static_argnames="batch")
def _set_acceptance(
    problem: RidgeProblem, weights: Float[Array, " N"], sets: Int[Array, "M m"], batch: int
) -> SetAcceptance:
    of_set = partial(_of_set, problem, weights.astype(problem.grams.dtype))
    # A batch of one would still be batched operations, for which the CPU has no fast Cholesky factorisation.
    return jax.lax.map(of_set, jnp.sort(sets, axis=1), batch_size=None if batch == 1 else batch)


def _of_set(problem: RidgeProblem, weights: Float[Array, " N"], layers: Int[Array, " m"]) -> SetAcceptance:
    n, v = len(problem.targets), len(problem.inner)
    share = weights[layers] / jnp.sum(weights[layers])
    K = problem.embedding
    for place in range(len(layers)):
        K = K + share[place] * problem.grams[layers[place]]

    leading = problem.targets[: n - v, :LEADING]
    mean = jnp.mean(leading, 0)

    def held_out(ridge: Float[Array, ""]) -> Float[Array, ""]:
        A, residual = _solve(K[: n - v, : n - v], ridge, leading - mean[None])
        predicted = _dot(K[n - v : n, : n - v], A) + mean[None]
        overlap = jnp.mean(_overlap(problem.inner, _logits(problem, predicted)))
        return jnp.where((residual <= PRECISE) & ~jnp.isnan(overlap), overlap, -jnp.inf)

    ridge, at_edge = _climb(held_out, K.dtype)
    A, residual = _solve(K[:n], ridge, problem.targets)
    logits = _logits(problem, _dot(K[n:], A))
    return SetAcceptance(
        by_sample=jax.ops.segment_sum(_overlap(problem.scored, logits), problem.samples, len(problem.counts)),
        # argmax costs a CPU ten times as much as max.
        hits=jnp.sum(jnp.take_along_axis(logits, problem.top[:, None], 1)[:, 0] == jnp.max(logits, 1), dtype=K.dtype),
        ridge=ridge,
        at_edge=at_edge,
        residual=residual,
    )


def _dot(A: Float[Array, "a b"], B: Float[Array, "b c"]) -> Float[Array, "a c"]:
    return jnp.dot(A, B, precision=HIGHEST)


def _solve(
    K: Float[Array, "n n"], ridge: Float[Array, ""], Y: Float[Array, "n r"]
) -> tuple[Float[Array, "n r"], Float[Array, ""]]:
    """`A = (K + λI)^-1 Y` and its relative residual; NaN where rounding left no positive definite matrix."""
    n = len(K)
    # Columns a power of two apart share a CPU's cache lines: LAPACK takes twice as long for 2048 rows as for 2064.
    more = 16 if n % 256 == 0 else 0
    # Its matrices stand column by column; those of the symmetric `K` are its rows, so that nothing is rearranged.
    padded = jnp.pad(K.T, (0, more)) + ridge * jnp.eye(n + more, dtype=K.dtype)
    lower = jax.lax.linalg.cholesky(padded, symmetrize_input=False)
    A = jax.scipy.linalg.cho_solve((lower, True), jnp.pad(Y, ((0, more), (0, 0))))[:n]
    few, wanted = A[:, :CHECKED], Y[:, :CHECKED]
    return A, jnp.linalg.norm(_dot(K, few) + ridge * few - wanted) / jnp.linalg.norm(wanted)


def _logits(problem: RidgeProblem, predicted: Float[Array, "p r"]) -> Float[Array, "p R"]:
    return _dot(predicted, problem.head[:, : predicted.shape[1]].T) + problem.offset[None]


def _overlap(p: Float[Array, "p R"], logits: Float[Array, "p R"]) -> Float[Array, " p"]:
    """Probability that speculative sampling accepts a token of `q̂ = softmax(logits)`: `Σ_v min(p, q̂)`."""
    return jnp.sum(jnp.minimum(p, jax.nn.softmax(logits, -1)), -1)


def _climb(
    value: Callable[[Float[Array, ""]], Float[Array, ""]], dtype: jnp.dtype
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The `λ` of greatest value, -inf where it is not to be taken, and whether it lies at the edge of what can be.

    Uphill on `RIDGES` until both neighbours are lower: with one peak, three or four factorisations find it. A parabola
    in `log λ` through the three highest points makes up for the coarse grid.
    """
    last = len(RIDGES) - 1
    unknown = jnp.full(last + 1, jnp.nan, dtype)
    grid = jnp.asarray(RIDGES, dtype)

    def peak(values: Float[Array, " L"]) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
        top = jnp.argmax(jnp.where(jnp.isnan(values), -jnp.inf, values)).astype(jnp.int32)
        return jnp.maximum(top - 1, 0), top, jnp.minimum(top + 1, last)

    def step(carry: tuple[Float[Array, " L"], Int[Array, ""]]) -> tuple[Float[Array, " L"], Int[Array, ""]]:
        values, place = carry
        values = values.at[place].set(value(grid[place]) - GAIN * place.astype(dtype))
        above, _, below = peak(values)
        onward = jnp.where(jnp.isnan(values[below]), below, last + 1)
        return values, jnp.where(jnp.isnan(values[above]), above, onward)

    start = (unknown, jnp.asarray(FIRST, jnp.int32))
    values, _ = jax.lax.while_loop(lambda carry: carry[1] <= last, step, start)
    above, top, below = peak(values)
    curvature = values[above] - 2 * values[top] + values[below]
    at_edge = (above == top) | (top == below) | ~jnp.isfinite(curvature)
    bent = ~at_edge & (curvature < 0)
    shift = jnp.where(bent, (values[above] - values[below]) / (2 * jnp.where(bent, curvature, 1)), 0)
    return grid[top] * 10 ** (-shift), at_edge
