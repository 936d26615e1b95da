"""Predicted acceptance of layer sets: the best linear draft in closed form, fitted and scored on the token sample.

What is decided here, beside the definition in `kernels/ridge.py`: the ridge `λ` is that of greatest acceptance at the
positions of a quarter of the fitting samples, for a fit on the others. (The λ of least squared error is ten times as
great and costs up to 0.02 of α̂ on real targets, as much as sets differ.) Then all fitting positions are fitted again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import SupportsIndex
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt64

from layerwave.calibration import Calibration
from layerwave.calibration.artifact import check_layers as check_states
from layerwave.calibration.token_sample import TokenSample
from layerwave.errors import LayerwaveError
from layerwave.kernels.ridge import LEADING, RIDGES, RidgeProblem, set_acceptance, token_grams
from layerwave.selection.sets import check_layers, ranking
from layerwave.warned import note, warn, warnings_kept

Layers = tuple[int, ...]

FEWEST = 16
"""Fitting positions without which nothing is fitted."""
FEW = 256
"""Fitting positions below which α̂ says little of what 2,048 would: a warning."""
FITTED = 3 / 4
"""Share of the fitting positions that are fitted while `λ` is chosen on the others; by whole samples."""
LEFT_OVER = 0.01
"""Share of the targets' variance that may be left out: 2/3 of 896 components stay, and α̂ changes by less than 4e-4."""
LEAST_COVERED, WELL_COVERED = 0.5, 0.9
"""The target's probability on the scored tokens: less than the first is an error, less than the second a warning."""
LARGEST_RESIDUAL = 0.01
"""Relative residual of a solve beyond which float32 does not suffice; real targets have 1e-4."""
CALL, BATCH = 64, 8
"""Sets that go to an accelerator in one call, and at a time there. On the CPU both are 1."""


@dataclass(frozen=True, eq=False)
class PredictedAcceptance:
    """Predicted acceptance of M layer sets, over the S scoring samples."""

    sets: tuple[Layers, ...]
    """The sets, each sorted, in the order given."""
    by_sample: Float[np.ndarray, "M S"]
    """Probability of acceptance, summed over the positions of each scoring sample."""
    counts: Int[np.ndarray, " S"]
    """Scoring positions of each sample."""
    agreement: Float[np.ndarray, " M"]
    """Share of the scoring positions where the draft's most probable token is the target's."""
    ridge: Float[np.ndarray, " M"]
    """`λ` of each fit; the Grams of states and embeddings have mean diagonal 1."""
    covered: float
    """Mean mass of the target's distribution on the tokens that are scored, 0 … 1."""

    @property
    def value(self) -> Float[np.ndarray, " M"]:
        """α̂: expected probability that the target accepts the draft's token, 0 … 1."""
        return self.by_sample.sum(axis=1) / self.counts.sum()

    @property
    def standard_error(self) -> Float[np.ndarray, " M"]:
        """Of α̂ over the scoring samples, positions of a sample being alike. The fit is taken as given."""
        return clustered_error(self.by_sample, self.counts)

    @property
    def best(self) -> int:
        """Place of the set of greatest α̂; of tied ones, that of fewer and then of lower layers."""
        most = max(map(len, self.sets))
        padded = np.array([(len(layers), *layers, *[-1] * (most - len(layers))) for layers in self.sets])
        return int(ranking(self.value, padded)[0])

    def difference(self, i: int, j: int) -> tuple[float, float]:
        """α̂ of set i minus α̂ of set j, and its standard error, paired over the scoring samples."""
        apart = self.by_sample[[i]] - self.by_sample[[j]]
        return float(apart.sum() / self.counts.sum()), float(clustered_error(apart, self.counts)[0])


def predicted_acceptance(
    calibration: Calibration, sets: Iterable[Iterable[SupportsIndex]], *, weighting: str = "raw"
) -> PredictedAcceptance:
    """How often the target would accept the token of the best linear draft that reads a layer set, for each set.

    Grams are taken once a calibration, and every set is scored once; both are kept as long as the calibration is
    (`N (n + n') n` floats: 600 MB for 24 layers at the default sizes). Attention sinks are used as the calibration's
    settings say. Values are float32, with errors of up to 1e-4.

    Args:
        calibration: with a token sample.
        sets: (M, m) integers, or sets of any sizes; 0-based layer outputs.
        weighting: `raw`: layers weigh by their norm; `trace`: every layer weighs the same.

    Raises:
        LayerwaveError: no token sample, fewer than 16 fitting positions, fewer than two samples to fit or to score,
            states that are not finite or all zero (the layer is named), a vocabulary that holds less than half of
            the target's probability, sets as in `elsi`, a set whose draft float32 cannot fit.

    Source: ours.
    """
    if weighting not in ("raw", "trace"):
        raise LayerwaveError(f"unknown weighting {weighting!r}: choose raw or trace")
    sets = list(sets)
    if not all(isinstance(layers, Iterable) for layers in sets):
        raise LayerwaveError(f"sets is {sets}, but each set has to be a list of layers: write [{sets}] for one")
    asked = [check_layers(layers, calibration.num_layers) for layers in sets]
    scorer = _scorer(calibration)
    scores = scorer.scores(asked, weighting)
    return PredictedAcceptance(
        sets=tuple(asked),
        by_sample=np.array([score.by_sample for score in scores]).reshape(len(scores), len(scorer.counts)),
        counts=scorer.counts,
        agreement=np.array([score.agreement for score in scores]),
        ridge=np.array([score.ridge for score in scores]),
        covered=scorer.covered,
    )


def acceptance_criterion(
    calibration: Calibration, alpha: float = 1.0, weighting: str = "raw"
) -> Callable[[np.ndarray], np.ndarray]:
    """Predicted acceptance α̂ of the best linear draft, 0 … 1; `alpha` is not used. See `predicted_acceptance`."""
    _scorer(calibration)  # what is wrong with the token sample is said before a search starts

    def acceptance(sets):
        return predicted_acceptance(calibration, sets, weighting=weighting).value

    return acceptance


def clustered_error(sums: Float[np.ndarray, "M S"], counts: Int[np.ndarray, " S"]) -> Float[np.ndarray, " M"]:
    """Standard error of `Σ sums / Σ counts` for independent samples: of a ratio, by its linearisation."""
    total, samples = counts.sum(), len(counts)
    apart = sums - (sums.sum(axis=1, keepdims=True) / total) * counts
    return np.sqrt((apart**2).sum(axis=1) * samples / (samples - 1)) / total


@dataclass(frozen=True)
class _Score:
    by_sample: Float[np.ndarray, " S"]
    agreement: float
    ridge: float


@dataclass(frozen=True, eq=False)
class _Scorer:
    """The problem of one calibration on the device, and every score found so far."""

    problem: RidgeProblem
    scales: Float[np.ndarray, " N"]
    """Mean squared norm of each layer at the fitting positions."""
    counts: Int[np.ndarray, " S"]
    covered: float
    found: dict[tuple[str, Layers], _Score] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def scores(self, sets: list[Layers], weighting: str) -> list[_Score]:
        new = [layers for layers in dict.fromkeys(sets) if (weighting, layers) not in self.found]
        for _, group in groupby(sorted(new, key=len), key=len):
            self._score(list(group), weighting)
        return [self.found[weighting, layers] for layers in sets]

    def _score(self, sets: list[Layers], weighting: str) -> None:
        weights = self.scales / self.scales.max() if weighting == "raw" else np.ones_like(self.scales)
        call, batch = (1, 1) if jax.default_backend() == "cpu" else (CALL, BATCH)
        positions, at_edge = self.counts.sum(), []
        for start in range(0, len(sets), call):
            part = np.array(sets[start : start + call], np.int32)
            padded = np.pad(part, ((0, call - len(part)), (0, 0)), mode="edge")  # one shape compiles
            results = jax.device_get(set_acceptance(self.problem, weights.astype(np.float32), padded, batch=batch))
            for layers, by_sample, hits, ridge, edge, residual in zip(part.tolist(), *results, strict=False):
                if not (residual <= LARGEST_RESIDUAL and np.isfinite(by_sample).all()):
                    raise LayerwaveError(
                        f"the draft of layers {layers} cannot be fitted in float32 (λ {ridge:.1e}, relative residual "
                        f"{residual:.1e}, at most {LARGEST_RESIDUAL}; mean α̂ {by_sample.sum() / positions:.3g}): look "
                        "for huge values in states and head, or calibrate with sinks='drop'"
                    )
                if edge:
                    at_edge.append((layers, float(ridge)))
                score = _Score(by_sample.astype(np.float64), float(hits) / positions, float(ridge))
                self.found[weighting, tuple(layers)] = score
        if at_edge:
            (layers, ridge), *_ = at_edge
            warn(
                f"λ of {len(at_edge)} sets, as {ridge:.1g} of layers {layers}, is the least or greatest that float32 "
                f"allows them between {RIDGES[-1]:g} and {RIDGES[0]:g}: another may fit better, or the states tell "
                "nothing"
            )


_SCORERS: WeakKeyDictionary[Calibration, _Scorer] = WeakKeyDictionary()


def _scorer(calibration: Calibration) -> _Scorer:
    if calibration not in _SCORERS:
        if calibration.tokens is None:
            origin = "states given with from_states have" if calibration.settings is None else "this calibration holds"
            raise LayerwaveError(
                f"{origin} no token sample, but predicted acceptance is fitted on it: run `layerwave calibrate` "
                "without --no-token-sample"
            )
        with warnings_kept() as warnings:
            scorer = _prepare(calibration.tokens, calibration.settings.sinks)
        _SCORERS[calibration] = replace(scorer, warnings=tuple(warnings))
    for warning in _SCORERS[calibration].warnings:
        note(warning)  # once said, it holds for all that is scored
    return _SCORERS[calibration]


def _prepare(tokens: TokenSample, sinks: str) -> _Scorer:
    used = tokens.used(sinks)
    fitting, scoring = np.flatnonzero(used & tokens.fitting), np.flatnonzero(used & tokens.scoring)
    _check_positions(tokens.samples[fitting], tokens.samples[scoring])
    order, choosing = _inner_split(tokens.samples[fitting])
    rows, n = np.concatenate([fitting[order], scoring]), len(fitting)

    states = tokens.states[:, rows]
    check_states(np.array([np.abs(layer.astype(np.float32)).max() for layer in states]))
    grams, scales = token_grams(jnp.asarray(states), n)
    scales = np.asarray(scales, np.float64)
    check_states(scales.astype(np.float32))

    embeddings, normed, head = (
        _finite(name, array.astype(np.float64))
        for name, array in (
            ("embeddings", tokens.embeddings[rows]),
            ("final-normed states", tokens.normed[rows]),
            ("head", tokens.head),
        )
    )
    rms = np.sqrt(np.mean(embeddings**2, axis=1, keepdims=True))
    unit = embeddings / np.where(rms == 0, 1, rms)  # a padding token's embedding may be zero
    (embedding,), (scale,) = token_grams(jnp.asarray(unit[None], jnp.float32), n)
    if scale == 0:
        raise LayerwaveError("the embeddings of the token sample are all zero: check the checkpoint")

    mean = normed[:n].mean(axis=0)
    directions = _leading_directions(normed[:n] - mean)
    logits = normed @ head.T
    log_mass = np.logaddexp.reduce(logits, axis=1)
    p = np.exp(logits - log_mass[:, None])
    covered = float(np.mean(np.exp(log_mass[n:] - tokens.log_normaliser[used[tokens.scoring]])))
    _check_covered(covered)

    _, sample, counts = np.unique(tokens.samples[scoring], return_inverse=True, return_counts=True)
    arrays = {
        "targets": (normed[:n] - mean) @ directions,
        "head": head @ directions,
        "offset": head @ mean,
        "inner": p[n - choosing : n],
        "scored": p[n:],
        "counts": counts,
    }
    problem = RidgeProblem(
        grams=grams,
        embedding=embedding,
        top=jnp.asarray(p[n:].argmax(axis=1), jnp.int32),
        samples=jnp.asarray(sample.reshape(-1), jnp.int32),
        **{name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()},
    )
    return _Scorer(problem, scales, counts, covered)


def _check_positions(fitting: UInt64[np.ndarray, " n"], scoring: UInt64[np.ndarray, " p"]) -> None:
    fit, score = len(np.unique(fitting)), len(np.unique(scoring))
    if len(fitting) < FEWEST or min(fit, score) < 2:
        raise LayerwaveError(
            f"the token sample has {len(fitting)} positions of {fit} samples to fit and {len(scoring)} of {score} to "
            f"score, but needs at least {FEWEST} fitting positions, and two samples on each side: "
            "calibrate on more or longer conversations, or ask for more positions on the smaller side (fit_positions, "
            "score_positions): its share of them is its share of the samples"
        )
    if len(fitting) < FEW:
        warn(
            f"drafts are fitted on {len(fitting)} positions of {fit} samples only, and the errors do not count that: "
            f"calibrate on more conversations, or with more fit_positions, for at least {FEW}"
        )


def _inner_split(samples: UInt64[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], int]:
    """An order in which positions that choose `λ` come last, and their number; whole samples, by fingerprint."""
    _, sample, counts = np.unique(samples, return_inverse=True, return_counts=True)
    # The cut between two samples that is nearest to the wanted share; none is empty.
    fitted = 1 + int(np.argmin(np.abs(np.cumsum(counts)[:-1] - FITTED * len(samples))))
    chooses = sample.reshape(-1) >= fitted
    return np.argsort(chooses, kind="stable"), int(chooses.sum())


def _leading_directions(Y: Float[np.ndarray, "n D"]) -> Float[np.ndarray, "D r"]:
    """Orthonormal directions of greatest variance that leave at most `LEFT_OVER`; all of them where they are few."""
    total, (n, features) = np.sum(Y**2), Y.shape
    if total == 0:
        raise LayerwaveError("the target's last states are the same at every position: give other conversations")
    if features <= LEADING:
        return np.eye(features)[:, np.argsort(-np.sum(Y**2, axis=0))]
    variances, vectors = np.linalg.eigh(Y.T @ Y if features <= n else Y @ Y.T)
    variances, vectors = variances[::-1], vectors[:, ::-1]
    kept = 1 + int(np.count_nonzero(np.cumsum(variances) < (1 - LEFT_OVER) * total))
    return vectors[:, :kept] if features <= n else Y.T @ vectors[:, :kept] / np.sqrt(variances[:kept])


def _finite(name: str, array: Float[np.ndarray, "Q D"]) -> Float[np.ndarray, "Q D"]:
    if not np.isfinite(array).all():
        raise LayerwaveError(
            f"the {name} of the token sample hold NaN or infinity, but must be finite: check the checkpoint, or load "
            "the target with dtype float32"
        )
    return array


def _check_covered(covered: float) -> None:
    held = f"the {covered:.1%} of the target's probability that the token sample's vocabulary holds"
    if not covered >= LEAST_COVERED:
        raise LayerwaveError(
            f"{held} are too little to score drafts by (at least {LEAST_COVERED:.0%}): calibrate with more "
            "score_positions, which bring more tokens"
        )
    if covered < WELL_COVERED:
        warn(f"drafts are scored on {held}; more score_positions would bring more tokens")
