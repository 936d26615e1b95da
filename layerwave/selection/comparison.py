"""All methods beside each other: what each chooses, and how far that is from the best set of its size."""

from collections.abc import Sequence
from dataclasses import dataclass

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.acceptance_scores import AcceptanceScores, Difference, ScoredSet
from layerwave.selection.acceptance_study import AcceptanceStudy
from layerwave.selection.baselines import rules
from layerwave.selection.beam import elsi
from layerwave.selection.exhaustive import SetRank, rank_among_all
from layerwave.selection.methods import SelectionSettings, select
from layerwave.selection.result import Selection


@dataclass(frozen=True)
class ComparedSelection:
    """One method's choice, and its place among all sets of that size."""

    selection: Selection
    place: SetRank
    """By entropy, whatever the criterion of the selection."""
    acceptance: ScoredSet | None
    """Predicted acceptance; None when no study was given."""
    behind: Difference | None
    """Its predicted acceptance minus that of the best scored set of its size."""

    @property
    def name(self) -> str:
        """What to call it beside the others."""
        return chooser(self.selection)


@dataclass(frozen=True)
class Comparison:
    """What every method chooses for every size; `unfit` says which fixed rules this target is too shallow for."""

    rows: tuple[ComparedSelection, ...]
    unfit: tuple[str, ...]

    def chosen(self, name: str, size: int) -> Selection:
        """The selection of one name (`ComparedSelection.name`) and size."""
        return next(row.selection for row in self.rows if (row.name, len(row.selection.layers)) == (name, size))


def compare(
    calibration: Calibration, sizes: Sequence[int] = (1, 2, 3), study: AcceptanceStudy | None = None
) -> Comparison:
    """Runs every method for every size with its defaults, and ranks the choices by entropy among all sets of a size.

    Args:
        study: of the calibration: adds predicted acceptance to every row, and the beam that maximises it; of the
            study's own size that is the study's.

    Raises:
        LayerwaveError: for a size that the target does not have, and as `predicted_acceptance` does.
    """
    rows, unfit = [], []
    for size in sizes:
        selections = [
            select(calibration, SelectionSettings(method, size))
            for method in ("exhaustive", "elsi", "elsi_c", "low_entropy")
        ]
        if study is not None:
            searched = len(study.selection.layers) == size
            selections.insert(0, study.selection if searched else elsi(calibration, size, criterion=study.scores))
        for rule in rules(size):
            try:
                selections.append(select(calibration, SelectionSettings(rule, size)))
            except LayerwaveError as error:  # the rule does not fit a target this shallow: reported, not replaced
                unfit.append(str(error))
        places = rank_among_all(calibration, [selection.layers for selection in selections])
        accepted = _accepted(study.scores, selections) if study is not None else [(None, None)] * len(selections)
        rows += [
            ComparedSelection(selection, place, *pair)
            for selection, place, pair in zip(selections, places, accepted, strict=True)
        ]
    return Comparison(tuple(rows), tuple(unfit))


def _accepted(scores: AcceptanceScores, selections: Sequence[Selection]) -> list[tuple[ScoredSet, Difference]]:
    """Each selection's predicted acceptance, alone and beside the best scored set of this size."""
    sets = [scores[selection.layers] for selection in selections]
    best = max(scores.of_size(len(selections[0].layers)), key=lambda scored: scored.value)
    return [(scored, scores.difference(scored, best)) for scored in sets]


def chooser(selection: Selection) -> str:
    """What chose a set: its method, or its criterion where that is not the entropy."""
    if selection.criterion == "entropy":
        return selection.method
    return selection.criterion if selection.method == "elsi" else f"{selection.method} by {selection.criterion}"
