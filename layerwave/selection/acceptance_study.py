"""What predicted acceptance says of a target: single layers, pairs, sets of growing size, and how sure all that is."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb

import numpy as np
from jaxtyping import Float

from layerwave.calibration import Calibration
from layerwave.selection.acceptance_scores import (
    APART,
    RESAMPLES,
    AcceptanceScores,
    Difference,
    Layers,
    ScoredSet,
    named,
)
from layerwave.selection.beam import elsi
from layerwave.selection.result import Selection
from layerwave.selection.sets import check_count, check_size

FEW = 20
"""Scoring conversations below which a standard error over them is itself uncertain by a sixth or more."""


@dataclass(frozen=True)
class Rung:
    """The best scored set of one size."""

    best: ScoredSet
    gain: Difference | None
    """Over the best set with one layer less; None for a single layer."""
    scored: int
    """Sets of this size that the search scored."""
    level: int
    """How many of the others are not told apart from the best."""
    frequency: float
    """Share of the resamples of the scoring conversations in which it is the best scored set of its size."""
    held_out: float
    """Mean α̂ of a resample's best set of this size on the conversations that it left out."""


@dataclass(frozen=True, eq=False)
class AcceptanceStudy:
    """Predicted acceptance of one calibration, with the errors that its conversations leave."""

    scores: AcceptanceScores
    """Every set that was scored, for more comparisons."""
    selection: Selection
    """The beam search, up to the largest size; its choice of that size."""
    seeds: Layers
    """The best single layers, best first: as many as the beam is wide."""
    pairs: Float[np.ndarray, "seeds N"]
    """α̂ of each seed with every other layer; NaN with itself, and throughout when single layers alone were scored."""
    ladder: tuple[Rung, ...]
    """The best scored set of every size, from one layer on."""
    smallest: ScoredSet
    """The smallest of them that is within one paired standard error of the best."""
    entropy: ScoredSet
    """The set that ELSI chooses by entropy, of the size of the best."""

    @property
    def singles(self) -> tuple[ScoredSet, ...]:
        """Every single layer, in order."""
        return tuple(self.scores[[layer]] for layer in range(self.scores.calibration.num_layers))

    @property
    def best(self) -> ScoredSet:
        """The set of greatest α̂ in the ladder; the smaller of two that tie."""
        return max((rung.best for rung in self.ladder), key=lambda scored: scored.value)

    @property
    def followed(self) -> tuple[ScoredSet, ...]:
        """The best, the smallest good and the entropy's set, each once: what a learning curve should show."""
        return tuple(dict.fromkeys([self.best, self.smallest, self.entropy]))

    @property
    def rung(self) -> Rung:
        """The step of the ladder on which the best set stands."""
        return self.ladder[len(self.best.layers) - 1]

    def to_record(self) -> dict[str, object]:
        """What the command line prints as JSON: ladder, sets that stand out, sentences."""
        return {
            "fitting_positions": int(self.scores.fitting.sum()),
            "scoring_positions": int(self.scores.counts.sum()),
            "scoring_conversations": len(self.scores.counts),
            "covered": float(self.scores.covered),
            "ladder": [asdict(rung) for rung in self.ladder],
            "best": asdict(self.best),
            "smallest": asdict(self.smallest) | {"behind": asdict(self.behind(self.smallest))},
            "entropy": asdict(self.entropy) | {"behind": asdict(self.behind(self.entropy))},
            "readings": self.readings,
        }

    def behind(self, scored: ScoredSet) -> Difference:
        """α̂ of a set minus that of the best one."""
        return self.scores.difference(scored, self.best)

    @property
    def readings(self) -> dict[str, str]:
        """What the numbers say, a sentence or two each, by what they are about."""
        return {
            "Best set": self._best,
            "Smallest good set": self._smallest,
            "Beside the entropy": self._entropy,
            "Stability": self._stability,
        }

    @property
    def _best(self) -> str:
        others, verb = self.rung.scored - 1, "scores" if len(self.best.layers) == 1 else "score"
        return (
            f"{named(self.best).capitalize()} {verb} best of {len(self.scores.sets)} sets: the target should accept a "
            f"token of the best linear draft that reads this set with probability {self.best}. "
            f"{others - self.rung.level} of the {others} other sets of its size are told apart from it: they differ by "
            f"more than {APART:g} standard errors of the paired difference over {len(self.scores.counts)} "
            "conversations."
        )

    @property
    def _smallest(self) -> str:
        if self.smallest.layers == self.best.layers:
            return (
                f"The smallest good set is the best one itself, {named(self.best)}: no smaller set comes within one "
                "paired standard error of it."
            )
        return (
            f"The smallest good set is {named(self.smallest)}, the smallest within one paired standard error of the "
            f"best: {self.smallest}, a difference of {self.behind(self.smallest)} to the best."
        )

    @property
    def _entropy(self) -> str:
        if self.entropy.layers == self.best.layers:
            return f"They agree: the entropy chooses {named(self.best)} too."
        apart = self.behind(self.entropy)
        verdict = "They conflict" if apart.told_apart else "They differ, but the sets are not told apart"
        return (
            f"{verdict}: of this size the entropy chooses {named(self.entropy)}, with {self.entropy}, a difference of "
            f"{apart} to the best."
        )

    @property
    def _stability(self) -> str:
        number = len(self.scores.counts)
        few = f" Only {number} conversations score, so that the errors themselves are rough." if number < FEW else ""
        held_out = ", ".join(
            f"{rung.held_out:.4f} with {size} layer{'s' * (size > 1)}" for size, rung in enumerate(self.ladder, start=1)
        )
        return (
            f"In {self.rung.frequency:.0%} of {RESAMPLES:,} resamples of the scoring conversations {named(self.best)} "
            "is the best set of its size; the drafts are not fitted again. The best of many looks a little too good "
            f"where it was chosen: on the conversations that a resample leaves out, its best sets have {held_out}.{few}"
        )


def acceptance_study(
    calibration: Calibration,
    size: int = 3,
    beam: int = 10,
    *,
    weighting: str = "raw",
    progress: Callable[[int, int], None] | None = None,
) -> AcceptanceStudy:
    """Scores single layers, pairs and a beam of larger sets by predicted acceptance, and compares what stands out.

    It scores the sets of one beam search, each once (`sets_to_score`): about 0.3 s a set on two cores at the default
    sizes of a token sample.

    Args:
        calibration: with a token sample.
        size: layers of the largest sets.
        beam: sets kept at each size, and seeds of the pairs.
        weighting: `raw`, or `trace`: every layer weighs the same.
        progress: called with the number of sets scored so far, and about how many there will be.

    Raises:
        LayerwaveError: no token sample, and as `predicted_acceptance` does.
    """
    num_layers = calibration.num_layers
    size, beam = check_size(size, num_layers), check_count("beam", beam)
    about = sets_to_score(num_layers, size, beam)
    scores = AcceptanceScores(calibration, weighting, progress and (lambda done: progress(min(done, about), about)))
    selection = elsi(calibration, size, beam, criterion=scores, weighting=weighting)
    bests = [scores[kept[0][0]] for kept in selection.beams]
    ladder = tuple(_rung(scores, bests, size) for size in range(1, size + 1))
    best = max(bests, key=lambda scored: scored.value)
    behind = [scores.difference(best, other) for other in bests]
    smallest = next(s for s, apart in zip(bests, behind, strict=True) if apart.value <= apart.standard_error)
    entropy = scores[elsi(calibration, len(best.layers), weighting=weighting).layers]
    seeds = tuple(layers[0] for layers, _ in selection.beams[0])
    return AcceptanceStudy(
        scores=scores,
        selection=selection,
        seeds=seeds,
        pairs=_pairs(scores, seeds),
        ladder=ladder,
        smallest=smallest,
        entropy=entropy,
    )


def sets_to_score(num_layers: int, size: int, beam: int) -> int:
    """Sets that a beam search scores, at most."""
    kept = min(beam, num_layers)
    return num_layers + sum(min(comb(num_layers, d + 1), kept * (num_layers - d)) for d in range(1, size))


def _rung(scores: AcceptanceScores, bests: Sequence[ScoredSet], size: int) -> Rung:
    best, rivals, resampled = bests[size - 1], scores.of_size(size), scores.resampled(size)
    others = [scored for scored in rivals if scored.layers != best.layers]
    return Rung(
        best=best,
        gain=scores.difference(best, bests[size - 2]) if size > 1 else None,
        scored=len(rivals),
        level=sum(not scores.difference(other, best).told_apart for other in others),
        frequency=resampled.frequency[best.layers],
        held_out=resampled.held_out,
    )


def _pairs(scores: AcceptanceScores, seeds: Layers) -> Float[np.ndarray, "seeds N"]:
    values = np.full((len(seeds), scores.calibration.num_layers), np.nan)
    place = {seed: row for row, seed in enumerate(seeds)}
    for pair in scores.of_size(2):
        for seed, companion in (pair.layers, pair.layers[::-1]):
            if seed in place:
                values[place[seed], companion] = pair.value
    return values
