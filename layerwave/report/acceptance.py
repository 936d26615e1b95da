"""The report's section on predicted acceptance."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.kernels import gram, matrix_entropy
from layerwave.report.figures import acceptance_curve, acceptance_ladder, acceptance_learning, acceptance_pairs
from layerwave.report.pictures import Picture, Pictures
from layerwave.report.tables import Table
from layerwave.selection import (
    AcceptanceStudy,
    LearningCurve,
    Selection,
    acceptance_study,
    baseline,
    chooser,
    learning_curve,
    rules,
    settings_of,
)
from layerwave.selection.sets import join

MOST_SETS, WIDEST_BEAM = 500, 10
"""Sets that the report scores at most (under three minutes on two cores): its beam is as wide as they allow, and at
most as the paper's."""

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class Section:
    """What stands in the section."""

    study: AcceptanceStudy
    readings: dict[str, str]
    pictures: list[Picture]
    tables: list[Table]
    missing: list[tuple[str, str]]
    """Title of a figure, or of a point of the learning curve, and why it is missing."""


def acceptance_section(calibration: Calibration, selections: Sequence[Selection], progress: Progress | None) -> Section:
    """Studies sets up to the size of the largest selection, at least pairs, and shows what came out.

    Raises `LayerwaveError` as `acceptance_study` does.
    """
    num_layers, chosen = calibration.num_layers, selections[0]
    size = min(num_layers, max(2, *(len(selection.layers) for selection in selections)))
    beam = (MOST_SETS - num_layers) // max(1, (num_layers - 1) * (size - 1))
    study = acceptance_study(
        calibration,
        size,
        min(WIDEST_BEAM, max(1, beam)),
        weighting=settings_of(chosen).weighting if chosen.criterion == "acceptance" else "raw",
        progress=progress,
    )
    curve = learning_curve(study.scores, study.followed)
    drawn = _pictures(study, curve)
    return Section(
        study=study,
        readings=study.readings | {"Learning curve": curve.reading},
        pictures=drawn.drawn,
        tables=list(_tables(calibration, study, selections)),
        missing=[*drawn.missing, *(("A point of the learning curve", why) for why in curve.missing)],
    )


def _pictures(study: AcceptanceStudy, curve: LearningCurve) -> Pictures:
    """The figures of predicted acceptance."""
    page = Pictures("acceptance")
    page.add("Predicted acceptance of single layers", lambda: (acceptance_curve(study), _singles_caption(study)))
    page.add("Predicted acceptance of pairs", lambda: (acceptance_pairs(study), COMPANIONS))
    page.add("What one more layer brings", lambda: (acceptance_ladder(study), LADDER))
    page.add("Fewer positions to fit on", lambda: (acceptance_learning(study, curve), LEARNING))
    return page


COMPANIONS = "α̂ of pairs: the best single layers, best on top, each with every companion. A dot marks each one's best."
LADDER = (
    "The best set of each size among those scored; bars are the standard error of its paired difference to the best of "
    "all. Below, the gain over the best set with one layer less, with its paired standard error: within two errors of "
    "zero it is none."
)
LEARNING = (
    "α̂ when the linear drafts are fitted on an eighth, a quarter, half and all of the positions; bars are the standard "
    "error of the paired difference to the best set. Where a curve still rises, α̂ is too low; what counts is whether "
    "curves cross."
)


def _singles_caption(study: AcceptanceStudy) -> str:
    best = max(study.singles, key=lambda scored: scored.value)
    return (
        f"α̂ of every layer alone; bars are the standard error of the paired difference to the best one, "
        f"layer {best.layers[0]}. (α̂ itself is known to ± {best.standard_error:.4f}, for all layers alike: some "
        "conversations are easy for every layer.)"
    )


def _tables(calibration: Calibration, study: AcceptanceStudy, selections: Sequence[Selection]) -> Iterable[Table]:
    """Predicted acceptance of the selections beside each other, of each size's best set, and of single layers."""
    named = [(f"{place}. {chooser(s)}", s.layers) for place, s in enumerate(selections, start=1)]
    named += [("best set", study.best.layers), ("smallest good set", study.smallest.layers)]
    named += [("entropy's set", study.entropy.layers)]
    fitting = _fitting_rules(calibration.num_layers, len(selections[0].layers))
    named += [(rule, layers) for rule, layers in fitting.items() if rule not in map(chooser, selections)]
    names: dict[tuple[int, ...], list[str]] = {}
    for name, layers in named:
        names.setdefault(layers, []).append(name)
    first = study.scores[selections[0].layers]
    rows = []
    for layers, called in names.items():
        s = study.scores[layers]
        apart = study.scores.difference(s, first) if s != first else None
        beside = (apart.value, apart.standard_error, "yes" if apart.told_apart else "no") if apart else (None,) * 3
        boundaries = join(layer + 1 for layer in layers)
        rows.append((", ".join(called), join(layers), boundaries, s.value, s.standard_error, s.agreement, *beside))
    yield Table(
        "Selections and rules by predicted acceptance",
        ("set", "layers", "boundaries", "α̂", "standard error", "top-1 agreement", "minus the first", "paired error",
         "told apart"),
        tuple(rows),
        (0,),
    )  # fmt: skip
    yield Table(
        "The best set of each size",
        ("size", "layers", "α̂", "standard error", "gain of the layer", "paired error", "sets scored",
         "not told apart from it", "best in share of resamples", "α̂ where not chosen on"),
        tuple(
            (len(r.best.layers), join(r.best.layers), r.best.value, r.best.standard_error, r.gain and r.gain.value,
             r.gain and r.gain.standard_error, r.scored, r.level, r.frequency, r.held_out)
            for r in study.ladder
        ),
        (len(study.smallest.layers) - 1,),
    )  # fmt: skip
    entropies = matrix_entropy(gram(calibration.states.astype(np.float64))).tolist()
    yield Table(
        "Single layers by predicted acceptance",
        ("layer l", "boundary b", "α̂", "standard error", "top-1 agreement", "λ", "S_1 (nats)"),
        tuple(
            (layer, layer + 1, s.value, s.standard_error, s.agreement, f"{s.ridge:.2g}", entropy)
            for layer, (s, entropy) in enumerate(zip(study.singles, entropies, strict=True))
        ),
        selections[0].layers,
    )


def _fitting_rules(num_layers: int, size: int) -> dict[str, tuple[int, ...]]:
    """The fixed rules of this size that fit the target."""
    found = {}
    for rule in rules(size):
        with suppress(LayerwaveError):  # the rules that do not fit are named beside the diagnostics
            found[rule] = baseline(rule, num_layers, size)
    return found
