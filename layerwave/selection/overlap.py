"""Where the fixed rules stand: among all sets of their size, and against the last beam of a search."""

from dataclasses import dataclass

import numpy as np

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.baselines import baseline, rules
from layerwave.selection.exhaustive import SetRank, rank_among_all
from layerwave.selection.methods import settings_of
from layerwave.selection.result import Selection
from layerwave.selection.sets import TIE


@dataclass(frozen=True)
class RuleOverlap:
    """One fixed rule against all sets of its size and against the frontier, the last beam of a search."""

    rule: str
    place: SetRank
    """The rule's layers, their score, and the rank among all sets of this size (`place.percentile`: 100 is best)."""
    held: tuple[int, ...]
    """The rule's layers that some set of the frontier holds; all of them when the rule ties with its last set."""
    frontier_rank: int | None
    """Place of the rule's set in the frontier, from 1; None when it is not one of its sets."""

    @property
    def share(self) -> float:
        """Share of the rule's layers that the frontier holds, 0 … 1."""
        return len(self.held) / len(self.place.layers)

    @property
    def reading(self) -> str:
        """One sentence."""
        place = self.place
        return (
            f"{self.rule} {list(place.layers)} ranks {place.rank} of {place.total} sets of its size (percentile "
            f"{place.percentile:.1f}), and the search's last beam holds {len(self.held)} of its {len(place.layers)} "
            "layers."
        )


@dataclass(frozen=True)
class BeamOverlap:
    """The fixed rules of one size against the frontier of one selection."""

    rules: tuple[RuleOverlap, ...]
    unfit: tuple[str, ...]
    """Why a rule of this size is missing: it does not fit a target this shallow."""
    frontier: int
    """Sets in the last beam."""
    covered: tuple[int, ...]
    """Layers that the last beam holds."""
    num_layers: int

    @property
    def chance(self) -> float:
        """Share of a random set's layers that the frontier holds on average: covered layers over all layers."""
        return len(self.covered) / self.num_layers

    @property
    def reading(self) -> str:
        """One sentence."""
        if not self.rules:
            return "No fixed rule of this size fits the target."
        best = max(self.rules, key=lambda rule: rule.place.percentile)
        return (
            f"The best fixed rule, {best.rule}, stands at percentile {best.place.percentile:.1f} of {best.place.total} "
            f"sets; the last beam ({self.frontier} sets) holds {best.share:.0%} of its layers, and would hold "
            f"{self.chance:.0%} of a random set's."
        )


def beam_overlap(calibration: Calibration, selection: Selection) -> BeamOverlap:
    """Ranks the fixed rules of the selection's size among all sets, and compares them with its last beam.

    All `C(N, m)` sets are scored, by the selection's criterion: about 0.1 ms a set on a CPU.

    Raises `LayerwaveError` for a selection that kept no beam, or came from another number of layers or from a
    criterion that has no registered name.
    """
    if selection.num_layers != calibration.num_layers:
        raise LayerwaveError(
            f"the selection is of {selection.num_layers} layers and the calibration of {calibration.num_layers}: "
            "select from this calibration"
        )
    if not selection.beams:
        raise LayerwaveError("the selection kept no beam to compare rules with: give one that `select` returned")
    frontier = [layers for layers, _ in selection.beams[-1]]
    covered = sorted(set().union(*frontier))
    fitting, unfit = {}, []
    for rule in rules(len(selection.layers)):
        try:
            fitting[rule] = baseline(rule, calibration.num_layers, len(selection.layers))
        except LayerwaveError as error:  # the rule does not fit a target this shallow: reported, not replaced
            unfit.append(str(error))
    s = settings_of(selection)
    last = np.min([score for _, score in selection.beams[-1]])
    places = (
        rank_among_all(calibration, fitting.values(), s.alpha, weighting=s.weighting, criterion=s.criterion)
        if fitting
        else ()
    )
    return BeamOverlap(
        rules=tuple(
            RuleOverlap(
                rule=rule,
                place=place,
                held=tuple(l for l in place.layers if l in covered or abs(place.score - last) <= TIE),
                frontier_rank=frontier.index(place.layers) + 1 if place.layers in frontier else None,
            )
            for rule, place in zip(fitting, places, strict=True)
        ),
        unfit=tuple(unfit),
        frontier=len(frontier),
        covered=tuple(covered),
        num_layers=calibration.num_layers,
    )
