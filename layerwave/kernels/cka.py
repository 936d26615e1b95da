"""Linear CKA between layers, alone and conditioned on a layer set, from one table of inner products.

Called from the host every function here computes in float64 on the CPU and returns numpy float64: the tables are
`N x N`, and transitions live in the last digits. Inside a trace they have the precision of the trace.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from layerwave.errors import LayerwaveError
from layerwave.kernels.host import host_grams
from layerwave.kernels.precision import AnyArray, always_in_float64, is_concrete, wide_dtype, widen
from layerwave.kernels.sets import check_sets

Estimator = Literal["biased", "debiased"]
HIGHEST = jax.lax.Precision.HIGHEST


def gram_table(states: Real[AnyArray, "N B D"], estimator: Estimator = "biased") -> Float[AnyArray, "N N"]:
    """Table `A_ij = ⟨HK_iH, HK_jH⟩_F` of the layers' centred Grams, up to one common positive factor.

    Products of concatenated sets are sums of its entries, so it holds every (conditional) CKA. `biased` centres
    with `H = I - 11ᵀ/B`, as the paper does. `debiased` U-centres (Székely and Rizzo 2014): its products are 0 on
    average for independent layers, however few the tokens, and so may be negative.

    Raises `LayerwaveError` for another estimator, for fewer than 4 tokens with `debiased` and, from the host, for a
    layer (by its number) that is not finite or is constant over tokens. Inside a trace such a layer gives NaN or 0.

    Source: the paper (arXiv 2610.12939), eq. 7.
    """
    _check_estimator(estimator, states.shape[1])
    if is_concrete(states):
        return gram_table_from_grams(host_grams(_in_range(np.asarray(states)), _SHIFTS[estimator]), estimator)
    return _inner_products(widen(states), estimator)


@partial(jax.jit, static_argnames="estimator")
def _inner_products(states: Float[Array, "N B D"], estimator: Estimator) -> Float[Array, "N N"]:
    shifted = jax.vmap(_SHIFTS[estimator])(states)
    # One power of two for all layers keeps squares of squares in range and rounds nothing.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(shifted)))
    shifted = jnp.ldexp(shifted, -exponent)
    return _products_of_grams(jnp.einsum("nbd,ncd->nbc", shifted, shifted, precision=HIGHEST), estimator)


def _in_range(states: Real[np.ndarray, "*batch B D"]) -> Real[np.ndarray, "*batch B D"]:
    """The states, float64 ones divided by a power of two: no square of a narrower type leaves the range of float64."""
    if states.dtype != np.float64:
        return states
    _, exponent = np.frexp(np.max(np.abs(states)))
    return np.ldexp(states, -exponent)


def _less_mean(X: Float[AnyArray, "*batch B D"]) -> Float[AnyArray, "*batch B D"]:
    """States less their mean row; exactly 0 for a constant layer. Of numpy and JAX arrays."""
    # The last row goes first, for the sake of constant layers. (The first row may hold an attention sink.)
    shifted = X - X[..., -1:, :]
    shifted -= shifted.mean(-2, keepdims=True)
    return shifted


def _less_middle_row(X: Float[AnyArray, "B D"]) -> Float[AnyArray, "B D"]:
    """States of a layer less the row whose norm is in the middle; exactly 0 for a constant layer."""
    return X - X[(X * X).sum(1).argsort()[len(X) // 2]][None]


# Features are shifted before the Gram is formed: a massive channel leaves no digits to a Gram centred afterwards. For
# the debiased table any shift will do, U-centring undoes it; a sink token moves the mean, but is no row of middle norm.
_SHIFTS = {"biased": _less_mean, "debiased": _less_middle_row}


@partial(jax.jit, static_argnames="estimator")
def _products_of_grams(grams: Float[Array, "N B B"], estimator: Estimator) -> Float[Array, "N N"]:
    if estimator == "debiased":
        grams = _u_centre(grams)
    table = jnp.einsum("ibc,jbc->ij", grams, grams, precision=HIGHEST)
    return (table + table.T) / 2


def centred_gram(states: Real[AnyArray, "*batch B D"]) -> Float[AnyArray, "*batch B B"]:
    """Gram `HKH` of the states less their mean row, exactly 0 for a constant layer; precision as in `gram`.

    The features are shifted, and not their Gram: a massive channel leaves no digits to a Gram centred afterwards.
    """
    if isinstance(states, np.ndarray):
        return host_grams(states, _less_mean).astype(wide_dtype(states))
    return _centred_gram(widen(states))


@jax.jit
def _centred_gram(states: Float[Array, "*batch B D"]) -> Float[Array, "*batch B B"]:
    centred = _less_mean(states)
    return jnp.einsum("...bd,...cd->...bc", centred, centred, precision=HIGHEST)


def gram_table_from_grams(centred: Float[AnyArray, "N B B"], estimator: Estimator = "biased") -> Float[AnyArray, "N N"]:
    """The table of `gram_table` where the states are gone and only their `centred_gram` is left; errors the same."""
    _check_estimator(estimator, centred.shape[1])
    table = _table_from_grams(centred, estimator=estimator)
    if is_concrete(table):
        _check_layers(np.diagonal(table), estimator)
    return table


@always_in_float64
def _table_from_grams(centred: Float[AnyArray, "N B B"], *, estimator: Estimator) -> Float[AnyArray, "N N"]:
    grams = widen(centred)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(grams)))
    return _products_of_grams(jnp.ldexp(grams, -exponent), estimator)


def _u_centre(K: Float[Array, "N B B"]) -> Float[Array, "N B B"]:
    """U-centred Grams, whose diagonal is left out and 0; exactly 0 where only rounding would be left."""
    B = K.shape[-1]
    trace = jnp.trace(K, axis1=1, axis2=2)[:, None, None]
    off_diagonal = ~jnp.eye(B, dtype=bool)[None]
    K = jnp.where(off_diagonal, K, 0)
    row = jnp.sum(K, 2, keepdims=True) / (B - 2)
    total = jnp.sum(row, 1, keepdims=True) / (B - 1)
    centred = jnp.where(off_diagonal, K - row - jnp.swapaxes(row, 1, 2) + total, 0)
    norm = jnp.sqrt(jnp.sum(centred**2, (1, 2), keepdims=True))
    return jnp.where(norm <= B * jnp.finfo(K.dtype).eps * trace, 0, centred)


def _check_estimator(estimator: str, tokens: int) -> None:
    if estimator not in ("biased", "debiased"):
        raise LayerwaveError(f"estimator={estimator!r}: expected 'biased' or 'debiased'")
    if estimator == "debiased" and tokens < 4:
        raise LayerwaveError(
            f"the debiased estimator on {tokens} tokens: expected at least 4; "
            "give more tokens, or take estimator='biased'"
        )


def _check_layers(squared_norms: Float[np.ndarray, " N"], estimator: Estimator) -> None:
    for layer, squared in enumerate(squared_norms):
        if not np.isfinite(squared):
            raise LayerwaveError(f"layer {layer} holds NaN or infinite states: expected finite numbers")
        if squared == 0:
            reason = {"biased": "is constant over tokens", "debiased": "is the same between all pairs of tokens"}
            raise LayerwaveError(
                f"layer {layer} {reason[estimator]}, so its {estimator} CKA is undefined: leave this layer out"
            )


def cka(states: Real[AnyArray, "N B D"], estimator: Estimator = "biased") -> Float[AnyArray, "N N"]:
    """Linear CKA `M_ij` between the states (`B` tokens each) of all layers; estimators and errors as in `gram_table`.

    1 exactly on the diagonal. Biased values lie in [0, 1] to rounding and, with few tokens of many features, near 1
    even for independent layers. Debiased values are near 0 for those and may be negative.

    Source: the paper (arXiv 2610.12939), eq. 7.
    """
    return _cka_from_table(gram_table(states, estimator))


@always_in_float64
def _cka_from_table(table: Float[AnyArray, "N N"]) -> Float[AnyArray, "N N"]:
    return _correlation(widen(table), jnp.eye(len(table), dtype=bool))


def conditional_cka(
    states: Real[AnyArray, "N B D"], sets: Int[AnyArray, "M m"], estimator: Estimator = "biased"
) -> Float[AnyArray, "M N N"]:
    """Conditional CKA `M_L(i,j) = CKA(Z_{L∪i}, Z_{L∪j})` of concatenated states for every set `L` and all `i`, `j`.

    Estimators and errors as in `gram_table`, values and errors of sets as in `conditional_cka_from_table`.

    Source: the paper (arXiv 2610.12939), eq. 8.
    """
    return conditional_cka_from_table(gram_table(states, estimator), sets)


def conditional_cka_from_table(
    table: Float[AnyArray, "*problems N N"], sets: Int[AnyArray, "M m"], problems: Int[AnyArray, " M"] | None = None
) -> Float[AnyArray, "M N N"]:
    """Conditional CKA of every set from the table of `gram_table`, in `O(N²)` a set.

    Sets of several calibrations go together: `table` is then a stack of tables, and `problems` names each set's.

    `L∪i = L` where `i` is in `L`, so the value is exactly 1 where `i = j` and where both are in `L`. When a member of
    `L` outweighs the rest, all of `M_L` is near 1: float32 then holds nothing of the transitions.

    Raises `LayerwaveError` for an empty set and, from the host, for a layer out of range or repeated in a set.

    Source: the paper (arXiv 2610.12939), eq. 8, with `⟨HK_PH, HK_QH⟩ = Σ_{i∈P} Σ_{j∈Q} A_ij`.
    """
    check_sets(sets, table.shape[-1])
    if problems is None:
        return _conditional(table[None], np.zeros(len(sets), np.int32), sets)
    return _conditional(table, problems, sets)


@always_in_float64
def _conditional(
    tables: Float[AnyArray, "R N N"], problems: Int[AnyArray, " M"], sets: Int[AnyArray, "M m"]
) -> Float[AnyArray, "M N N"]:
    return _conditional_batch(widen(tables), problems, sets)


@jax.jit
@partial(jax.vmap, in_axes=(None, 0, 0))
def _conditional_batch(
    tables: Float[Array, "R N N"], problem: Int[Array, ""], layers: Int[Array, " m"]
) -> Float[Array, "N N"]:
    A = tables[problem]
    member = jnp.any(layers[:, None] == jnp.arange(len(A))[None, :], 0)
    # ⟨L∪i, L∪j⟩ = ⟨L,L⟩ + ⟨i,L⟩ + ⟨L,j⟩ + ⟨i,j⟩, where an i that is in L adds nothing.
    with_set = jnp.sum(A[:, layers], 1)
    within = jnp.sum(with_set[layers])
    added = jnp.where(member, 0, with_set)
    pairs = jnp.where(member[:, None] | member[None, :], 0, A)
    products = within + (added[:, None] + added[None, :]) + pairs
    return _correlation(products, jnp.eye(len(A), dtype=bool) | (member[:, None] & member[None, :]))


@jax.jit
def _correlation(products: Float[Array, "N N"], same: Bool[Array, "N N"]) -> Float[Array, "N N"]:
    """`P_ij / (√P_ii √P_jj)`, two roots because the product under one may overflow; 1 between the same things."""
    norms = jnp.sqrt(jnp.diagonal(products))
    ratio = products / (norms[:, None] * norms[None, :])
    return jnp.where(same & (norms > 0)[:, None], 1, ratio)


@always_in_float64
def transitions(M: Float[AnyArray, "*batch N N"]) -> Float[AnyArray, "*batch N-1"]:
    """Transition sizes `δ_l = ‖M_{l+1,:} - M_{l,:}‖_2` between neighbouring layers, `l = 0 … N-2`.

    Source: the paper (arXiv 2610.12939), the definition after eq. 7.
    """
    return _row_steps(widen(M))


@jax.jit
def _row_steps(M: Float[Array, "*batch N N"]) -> Float[Array, "*batch N-1"]:
    return jnp.linalg.norm(jnp.diff(M, axis=-2), axis=-1)


def shuffled_cka(
    centred: Float[AnyArray, "N B B"], orders: Int[AnyArray, "R N B"], estimator: Estimator = "biased"
) -> Float[AnyArray, "R N N"]:
    """CKA after the tokens of each layer were put into another order, `R` times; from the layers' `centred_gram`.

    `orders[r, l]` is a permutation of the tokens of layer `l`. Independent random ones give what layers without any
    relation would show. Errors as in `gram_table`.
    """
    gram_table_from_grams(centred, estimator)  # its checks: an order changes no norm
    return _shuffled_cka(centred, orders, estimator=estimator)


@always_in_float64
def _shuffled_cka(
    centred: Float[AnyArray, "N B B"], orders: Int[AnyArray, "R N B"], *, estimator: Estimator
) -> Float[AnyArray, "R N N"]:
    grams = widen(centred)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(grams)))
    return _shuffled_batch(jnp.ldexp(grams, -exponent), orders, estimator)


@partial(jax.jit, static_argnames="estimator")
def _shuffled_batch(
    grams: Float[Array, "N B B"], orders: Int[Array, "R N B"], estimator: Estimator
) -> Float[Array, "R N N"]:
    def one(order: Int[Array, "N B"]) -> Float[Array, "N N"]:
        shuffled = jax.vmap(lambda K, tokens: K[tokens][:, tokens])(grams, order)
        return _correlation(_products_of_grams(shuffled, estimator), jnp.eye(len(grams), dtype=bool))

    return jax.lax.map(one, orders)
