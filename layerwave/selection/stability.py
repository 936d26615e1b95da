"""How far the choice of layers depends on the samples: bootstrap frequencies, intervals, and a convergence curve.

The calibration pass kept, beside the sums of all samples, those of R Poisson(1) resamples and of nested subsets of the
samples (`calibration/replicates.py`). All of them, and the whole, go through one batched beam search.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, SupportsIndex

import numpy as np
from jaxtyping import Float, Float64, Int64

from layerwave.calibration import Calibration
from layerwave.calibration.artifact import check_layers as check_states
from layerwave.calibration.replicates import SHARES, Replicates
from layerwave.errors import LayerwaveError
from layerwave.kernels import centred_gram, gram, gram_table_from_grams, set_entropy
from layerwave.selection.beam import Score, beam_search, every_other_layer, greatest_transitions
from layerwave.selection.criteria import in_few_shapes
from layerwave.selection.sets import check_count, check_layers, check_size, join

Layers = tuple[int, ...]

STABLE, FAIR = 0.8, 0.5
"""Shares of the replicates from which on a choice is called stable, or fair (our decision)."""


@dataclass(frozen=True)
class SetStability:
    """One layer set over the bootstrap replicates."""

    layers: Layers
    """The set, sorted; 0-based layer outputs."""
    frequency: float
    """Share of the replicates that chose it, 0 … 1."""
    score: float
    """Its score in the whole calibration, nats."""
    low: float
    """2.5 % quantile of its score over the replicates less `shift`, nats: what other samples, as many, would give."""
    high: float
    """97.5 % quantile less `shift`, nats."""
    shift: float
    """Mean score of the replicates less `score`, nats. A replicate averages over the noise of about half as many
    samples, and noise raises the entropy; so a large shift says that the score would fall with more samples."""

    @property
    def settled(self) -> bool:
        """Whether the shift lies within half the width of the interval (our decision)."""
        return abs(self.shift) <= (self.high - self.low) / 2


@dataclass(frozen=True)
class ConvergencePoint:
    """What is chosen from a part of the samples; the parts are nested."""

    share: float
    """Probability with which a sample belongs to the part: 0.125, 0.25, 0.5, or 1 for the whole."""
    samples: int
    """Samples that do."""
    blocks: int
    """Blocks that they gave."""
    layers: Layers
    score: float
    """Score of the set in this part, nats."""


@dataclass(frozen=True, eq=False)
class Stability:
    """How often each layer and each set is chosen when the samples are drawn again, and when there are fewer."""

    method: str
    """`elsi` or `elsi_c`."""
    layers: Layers
    """The choice from all samples, sorted; 0-based layer outputs."""
    score: float
    """Its entropy in the whole calibration, nats."""
    replicates: int
    """Replicates R that were searched."""
    empty: int
    """Replicates that drew no block and were left out of all that is said here."""
    samples: int
    """Samples of the calibration, those without a block included."""
    layer_frequency: Float[np.ndarray, " N"]
    """Share of the replicates whose set holds the layer; sums to the size of the set."""
    sets: tuple[SetStability, ...]
    """The choice first, then every other set that a replicate chose, most frequent first, then those asked for."""
    convergence: tuple[ConvergencePoint, ...]
    """The choice from growing parts of the samples; the last point is the whole. Parts without a block are absent."""
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    """The options of the search, as given."""

    @property
    def num_layers(self) -> int:
        """N."""
        return len(self.layer_frequency)

    @property
    def frequency(self) -> float:
        """Share of the replicates that made the same choice as the whole."""
        return self.sets[0].frequency

    @property
    def settled_from(self) -> float:
        """Least share of the samples from which on every part makes the choice of the whole; 1: only the whole does."""
        share = 1.0
        for point in reversed(self.convergence):
            if point.layers != self.layers:
                break
            share = point.share
        return share

    @property
    def verdict(self) -> str:
        """`stable` (chosen in at least 80 % of the replicates), `fair` (at least 50 %) or `unstable`; ours."""
        return "stable" if self.frequency >= STABLE else "fair" if self.frequency >= FAIR else "unstable"

    @property
    def reading(self) -> str:
        """One sentence: how often the choice came again, the interval of its score, and from which share on."""
        chosen, rivals = self.sets[0], [row for row in self.sets[1:] if row.frequency > 0]
        rival = f", {join(rivals[0].layers)} in {rivals[0].frequency:.0%}" if rivals else ""
        part = f"{100 * self.settled_from:g} % of the samples already make"
        since = "only all samples make" if self.settled_from == 1 else part
        trend = "" if chosen.settled else f", but not settled: replicates differ by {chosen.shift:+.3f} on average"
        return (
            f"{self.verdict.capitalize()}: layers {join(self.layers)} come out in {chosen.frequency:.0%} of "
            f"{self.replicates} bootstrap replicates{rival}; {since} this choice; entropy {chosen.score:.3f} nats, "
            f"95 % interval {chosen.low:.3f} to {chosen.high:.3f}{trend}."
        )


def stability(
    calibration: Calibration,
    size: int = 3,
    method: str = "elsi",
    beam: int = 10,
    *,
    expand: int = 10,
    pool: int = 5,
    alpha: float = 1.0,
    weighting: str = "raw",
    estimator: Literal["biased", "debiased"] = "biased",
    sets: Iterable[Iterable[SupportsIndex]] = (),
) -> Stability:
    """Selects from every bootstrap replicate and from growing parts of the samples, all in one batched beam search.

    A replicate counts each sample Poisson(1) times, so that samples, not blocks, are drawn again: blocks of one sample
    are not independent. Scores of replicates lie to one side of the whole's, because the entropy of an average rises
    with the noise left in it; `SetStability` tells this shift apart from the spread.

    Args:
        calibration: of a target, with `replicates` > 0.
        size, beam, expand, alpha, weighting: as in `elsi`. The criterion is the entropy.
        method: `elsi`; or `elsi_c`, with `pool` and `estimator` as there.
        sets: further sets of any size, such as a fixed rule, whose frequency and interval are wanted.

    Raises:
        LayerwaveError: no replicates, fewer than two that drew a block, options out of range, a layer that is all zero
            or, for `elsi_c`, constant over tokens.

    Source: Chamandy, Muralidharan, Najmi and Naidu, "Estimating uncertainty for massive data streams", Google 2012.
    """
    num_layers = calibration.num_layers
    size = check_size(size, num_layers)
    beam, expand, pool = check_count("beam", beam), check_count("expand", expand), check_count("pool", pool)
    if method not in ("elsi", "elsi_c"):
        raise LayerwaveError(f"stability of the method {method!r}: choose elsi or elsi_c, the ones that search a beam")
    if weighting not in ("raw", "trace"):
        raise LayerwaveError(f"unknown weighting {weighting!r}: choose raw or trace")
    asked = [check_layers(layers, num_layers) for layers in sets]

    # Problem 0 is the whole; then come the parts of the samples and the replicates, where they hold a block.
    weights, replicates = _accumulators(calibration)
    blocks = weights @ calibration.sample_blocks
    columns = np.flatnonzero(blocks > 0)
    parts = columns[columns < len(SHARES)]
    draws = 1 + np.arange(len(parts), len(columns))
    if len(draws) < 2:
        raise LayerwaveError(
            f"{len(draws)} of {calibration.settings.replicates} replicates hold a block, but at least 2 must: "
            "calibrate with more replicates, or more and longer conversations"
        )
    states = calibration.states.astype(np.float64)
    grams = np.concatenate([gram(states)[None], replicates.grams[columns]])
    centred = np.concatenate([centred_gram(states)[None], replicates.centred[columns]])
    traces = np.trace(grams, axis1=2, axis2=3)
    check_states(traces.min(axis=0).astype(np.float32))
    if weighting == "trace":
        grams, centred = (K / traces[:, :, None, None] for K in (grams, centred))

    score = entropy_in_problems(grams, alpha)
    if method == "elsi":
        propose, width, options = every_other_layer(num_layers), expand, {"expand": expand}
    else:
        tables = np.stack([gram_table_from_grams(K, estimator) for K in centred])
        propose, width, options = greatest_transitions(tables, pool), num_layers, {"pool": pool, "estimator": estimator}
    _, choice = beam_search(score, propose, num_layers, size, beam, width, num_problems=len(grams))
    chosen, scores = [tuple(layers) for layers in choice.sets.tolist()], choice.scores.tolist()

    frequency = Counter(chosen[draw] for draw in draws)
    reported = dict.fromkeys([chosen[0], *(layers for layers, _ in frequency.most_common()), *asked])
    convergence = [
        ConvergencePoint(SHARES[part], int(weights[part].sum()), int(blocks[part]), chosen[k], scores[k])
        for k, part in enumerate(parts, start=1)
    ]
    samples = len(calibration.lengths)
    return Stability(
        method=method,
        layers=chosen[0],
        score=scores[0],
        replicates=len(draws),
        empty=calibration.settings.replicates - len(draws),
        samples=samples,
        layer_frequency=np.bincount(choice.sets[draws].reshape(-1), minlength=num_layers) / len(draws),
        sets=tuple(_over_draws(layers, frequency[layers] / len(draws), score, draws) for layers in reported),
        convergence=(
            *convergence,
            ConvergencePoint(1.0, samples, int(calibration.sample_blocks.sum()), chosen[0], scores[0]),
        ),
        settings={"size": size, "beam": beam, **options, "alpha": alpha, "weighting": weighting},
    )


def _accumulators(calibration: Calibration) -> tuple[Int64[np.ndarray, "C S"], Replicates]:
    """Weights of the samples, and the Grams that they made."""
    if calibration.replicates is None:
        origin = "states given with from_states have" if calibration.settings is None else "this calibration holds"
        raise LayerwaveError(
            f"{origin} no bootstrap replicates, but stability is read from them: "
            "run `layerwave calibrate` with --replicates 32"
        )
    return calibration.sample_weights.astype(np.int64), calibration.replicates


def entropy_in_problems(grams: Float64[np.ndarray, "R N B B"], alpha: float) -> Score:
    """Entropy (nats) of sets, each in its problem: layer l of problem r is Gram `r N + l` of one long list."""
    num_layers, block = grams.shape[1:3]
    listed = grams.reshape(-1, block, block)

    @in_few_shapes
    def entropy(rows: Int64[np.ndarray, "M m"]) -> Float64[np.ndarray, "M"]:
        return set_entropy(listed, rows, alpha)

    return lambda problems, sets: entropy(problems[:, None] * num_layers + sets)


def _over_draws(layers: Layers, frequency: float, score: Score, draws: Int64[np.ndarray, " R"]) -> SetStability:
    problems = np.concatenate([[0], draws])
    whole, *scores = score(problems, np.tile(layers, (len(problems), 1))).tolist()
    shift = float(np.mean(scores)) - whole
    low, high = (np.quantile(scores, (0.025, 0.975)) - shift).tolist()
    return SetStability(layers, frequency, whole, low, high, shift)
