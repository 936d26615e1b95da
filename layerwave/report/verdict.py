"""What the report says first: whether the choice would come again, and what speaks against it."""

from dataclasses import dataclass

from layerwave.calibration import Calibration
from layerwave.selection import AcceptanceStudy, Diagnostics, Selection
from layerwave.selection.stability import FAIR, STABLE


@dataclass(frozen=True)
class Verdict:
    """Sentences on one selection."""

    grade: str
    """`stable`, `fair` or `unstable`; empty where it is unknown."""
    stability: str
    """Why this grade; empty where it is unknown."""
    warnings: tuple[str, ...]
    readings: dict[str, str]
    """What else the diagnostics say, by title."""


def verdict(
    calibration: Calibration, selection: Selection, diagnostics: Diagnostics, study: AcceptanceStudy | None
) -> Verdict:
    """The verdict on a selection from its diagnostics, and from predicted acceptance where it was studied.

    What calibration and selection warned of when they were made stands among its warnings.
    """
    grade, stability, warnings = "", "", []
    if selection.criterion == "acceptance" and study is not None:
        grade, stability = _over_conversations(selection, study)
    elif diagnostics.stability is not None:
        grade, stability = diagnostics.stability.verdict, diagnostics.stability.reading
    else:
        why = dict(diagnostics.missing)["Stability"]
        warnings.append(f"How far the choice depends on the samples is unknown: {why}")
    if study is not None:
        warnings += _behind(selection, study)
    warnings += diagnostics.warnings.values()
    warnings += dict.fromkeys((*calibration.warnings, *selection.warnings))
    calm = {t: r for t, r in diagnostics.readings.items() if t not in diagnostics.warnings and t != "Stability"}
    return Verdict(grade, stability, tuple(warnings), calm)


def _over_conversations(selection: Selection, study: AcceptanceStudy) -> tuple[str, str]:
    scored = study.scores[selection.layers]
    frequency = study.scores.resampled(len(selection.layers)).frequency[selection.layers]
    grade = "stable" if frequency >= STABLE else "fair" if frequency >= FAIR else "unstable"
    return grade, (
        f"{grade.capitalize()}: in {frequency:.0%} of the resamples of {len(study.scores.counts)} scoring "
        f"conversations this is the best of the sets of its size that were scored, α̂ = {scored}; the drafts are "
        "not fitted again."
    )


def _behind(selection: Selection, study: AcceptanceStudy) -> list[str]:
    """Whether a linear draft is predicted to do better with another set."""
    scored = study.scores[selection.layers]
    apart = study.behind(scored)
    if apart.value >= 0 or not apart.told_apart:
        return []
    best = study.best
    return [
        f"A linear draft is predicted to do better with layers {','.join(map(str, best.layers))} ({best}) than with "
        f"this set ({scored}): a difference of {apart}."
    ]
