"""All methods beside each other: what each chooses, and how far that is from the best set of its size."""

from collections.abc import Sequence
from dataclasses import dataclass

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.baselines import rules
from layerwave.selection.exhaustive import SetRank, rank_among_all
from layerwave.selection.methods import SelectionSettings, select
from layerwave.selection.result import Selection


@dataclass(frozen=True)
class ComparedSelection:
    """One method's choice, and its place among all sets of that size."""

    selection: Selection
    place: SetRank


@dataclass(frozen=True)
class Comparison:
    """What every method chooses for every size; `unfit` says which fixed rules this target is too shallow for."""

    rows: tuple[ComparedSelection, ...]
    unfit: tuple[str, ...]

    def chosen(self, method: str, size: int) -> Selection:
        """The selection of one method and size."""
        return next(
            row.selection for row in self.rows if (row.selection.method, len(row.selection.layers)) == (method, size)
        )


def compare(calibration: Calibration, sizes: Sequence[int] = (1, 2, 3)) -> Comparison:
    """Runs every method for every size with its defaults, and ranks the choices among all sets of their size.

    Raises `LayerwaveError` for a size that the target does not have.
    """
    rows, unfit = [], []
    for size in sizes:
        searched = [
            select(calibration, SelectionSettings(method, size))
            for method in ("exhaustive", "elsi", "elsi_c", "low_entropy")
        ]
        fixed = []
        for rule in rules(size):
            try:
                fixed.append(select(calibration, SelectionSettings(rule, size)))
            except LayerwaveError as error:  # the rule does not fit a target this shallow: reported, not replaced
                unfit.append(str(error))
        selections = searched + fixed
        places = rank_among_all(calibration, [selection.layers for selection in selections])
        rows += [ComparedSelection(*pair) for pair in zip(selections, places, strict=True)]
    return Comparison(tuple(rows), tuple(unfit))
