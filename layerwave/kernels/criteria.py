"""Scores of layer sets beside the paper's entropy: of the spectrum of a set's Gram, and of a table of similarities."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from layerwave.errors import LayerwaveError
from layerwave.kernels.lapack import symmetric_eigenvalues
from layerwave.kernels.precision import AnyArray, always_in_float64, is_concrete, numpy_in_float64, widen
from layerwave.kernels.sets import check_sets, map_sets


def set_spectra(K: Float[AnyArray, "N B B"], sets: Int[AnyArray, "M m"], *, chunk: int = 256) -> Float[AnyArray, "M B"]:
    """Eigenvalues, ascending, of the Gram of each set's concatenated layers; from the `N` Grams, in chunks of sets.

    float32 and float64 are kept. Raises `LayerwaveError` for an empty set, a chunk of fewer than 1 set and, where sets
    are not traced, for a layer out of range or repeated in a set.
    """
    check_sets(sets, K.shape[0])
    if chunk < 1:
        raise LayerwaveError(f"chunk={chunk}: expected at least 1 set a chunk")
    return _set_spectra(K, sets, chunk=chunk)


@numpy_in_float64
def _set_spectra(K: Float[AnyArray, "N B B"], sets: Int[AnyArray, "M m"], *, chunk: int) -> Float[AnyArray, "M B"]:
    return _stream_spectra(widen(K), sets, chunk)


@partial(jax.jit, static_argnames="chunk")
def _stream_spectra(K: Float[Array, "N B B"], sets: Int[Array, "M m"], chunk: int) -> Float[Array, "M B"]:
    return map_sets(symmetric_eigenvalues, K, sets, chunk)


@numpy_in_float64
def coding_rate(spectrum: Float[AnyArray, "*batch B"], *, scale: int | float) -> Float[AnyArray, "*batch"]:
    """Rate `½ log det(I + c K) = ½ Σ log(1 + c λ_i)` in nats from the eigenvalues of a Gram; `scale` is `c > 0`.

    With `c = D / (B ε²)` it is the number of nats that code `B` vectors of `D` features up to a mean squared error
    `ε²`. As a function of layer sets it is monotone and submodular.

    Source: Ma, Derksen, Hong and Wright, "Segmentation of multivariate mixed data via lossy data coding and
    compression", TPAMI 2007; Yu et al., arXiv 2006.08558.
    """
    return jnp.sum(jnp.log1p(scale * jnp.maximum(widen(spectrum), 0)), -1) / 2


@numpy_in_float64
def effective_rank(spectrum: Float[AnyArray, "*batch B"]) -> Float[AnyArray, "*batch"]:
    """`exp(-Σ p_i log p_i)` of `p = σ / Σσ`, the *singular values* `σ = √λ` of the states; between 1 and `B`.

    The entropy of the paper has `p = σ² / Σσ²`, and is another criterion. Eigenvalues up to `B ε λ_max` (`ε` of the
    float type) are rounding of a Gram and count as 0: under the root they would weigh `√ε` each. NaN for a zero
    spectrum.

    Source: Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    spectrum = widen(spectrum)
    noise = spectrum.shape[-1] * jnp.finfo(spectrum.dtype).eps * jnp.max(spectrum, -1, keepdims=True)
    sigma = jnp.sqrt(jnp.where(spectrum <= noise, 0, spectrum))
    p = sigma / jnp.sum(sigma, -1, keepdims=True)
    return jnp.exp(-jnp.sum(p * jnp.log(jnp.where(p == 0, 1, p)), -1))


def set_log_det(
    similarity: Float[AnyArray, "N N"], sets: Int[AnyArray, "M m"], *, ridge: int | float = 0.0
) -> Float[AnyArray, " M"]:
    """`log det(S_L + τ I)` of the principal submatrix of each set: the log weight that a DPP gives it; `ridge` is `τ`.

    `S` is symmetric and positive semidefinite. Eigenvalues that rounding made negative count as 0, so a set of
    copies has `-inf` unless there is a ridge. Float64 from the host, as in `cka`.

    Raises `LayerwaveError`, from the host, for a similarity with an eigenvalue below -1e-9 times the greatest (then
    determinants have no meaning as volumes) or one that is not finite, and for sets as `set_entropy` does.

    Source: Kulesza and Taskar, "Determinantal point processes for machine learning", arXiv 1207.6083.
    """
    check_sets(sets, len(similarity))
    if is_concrete(similarity):
        _check_semidefinite(np.asarray(similarity, np.float64))
    return _set_log_det(similarity, sets, ridge=float(ridge))


@always_in_float64
def _set_log_det(
    similarity: Float[AnyArray, "N N"], sets: Int[AnyArray, "M m"], *, ridge: float
) -> Float[AnyArray, " M"]:
    return _log_det(_submatrices(widen(similarity), jnp.asarray(sets)), ridge)


@jax.jit
def _log_det(S: Float[Array, "M m m"], ridge: Float[Array, ""]) -> Float[Array, " M"]:
    return jnp.sum(jnp.log(jnp.maximum(symmetric_eigenvalues(S), 0) + ridge), -1)


def _check_semidefinite(similarity: Float[np.ndarray, "N N"]) -> None:
    if not np.isfinite(similarity).all():
        raise LayerwaveError("the similarity holds NaN or infinity: expected finite numbers")
    least, greatest = np.linalg.eigvalsh(similarity)[[0, -1]]
    if least < -1e-9 * greatest:
        raise LayerwaveError(
            f"the similarity has the eigenvalue {least:.3g} (greatest {greatest:.3g}): a DPP needs a positive "
            "semidefinite one, as the debiased and the biased CKA are"
        )


@always_in_float64
def relevance_redundancy(
    similarity: Float[AnyArray, "N N"],
    sets: Int[AnyArray, "M m"],
    relevance: Float[AnyArray, " N"],
    *,
    penalty: int | float,
) -> Float[AnyArray, " M"]:
    """Mean relevance of a set's layers minus `penalty` times their mean similarity in pairs (0 for single layers).

    Source: Peng, Long and Ding, "Feature selection based on mutual information: criteria of max-dependency,
    max-relevance, and min-redundancy", TPAMI 2005: the difference form, there with mutual information and with `i = j`.
    """
    check_sets(sets, len(similarity))
    pairs = _submatrices(widen(similarity), jnp.asarray(sets))
    return _relevance_redundancy(pairs, jnp.asarray(relevance)[jnp.asarray(sets)], float(penalty))


@jax.jit
def _relevance_redundancy(
    pairs: Float[Array, "M m m"], relevance: Float[Array, "M m"], penalty: Float[Array, ""]
) -> Float[Array, " M"]:
    m = relevance.shape[1]
    redundancy = (jnp.sum(pairs, (1, 2)) - jnp.trace(pairs, axis1=1, axis2=2)) / max(m * (m - 1), 1)
    return jnp.mean(relevance, 1) - penalty * redundancy


@jax.jit
def _submatrices(S: Float[Array, "N N"], sets: Int[Array, "M m"]) -> Float[Array, "M m m"]:
    sets = jnp.sort(sets, axis=1)
    return S[sets[:, :, None], sets[:, None, :]]
