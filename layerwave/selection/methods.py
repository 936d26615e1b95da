"""All methods under one name each: what `layerwave select` runs."""

from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.baselines import RULES, baseline
from layerwave.selection.beam import elsi, elsi_c
from layerwave.selection.exhaustive import exhaustive
from layerwave.selection.result import Selection, as_beam
from layerwave.selection.scores import make_criterion
from layerwave.warned import warnings_kept

METHODS = ("elsi", "elsi_c", "exhaustive", "low_entropy", *RULES)


@dataclass(frozen=True)
class SelectionSettings:
    """Options of a selection; those that a method does not have are ignored, as their help says."""

    method: str = "elsi"
    """elsi, elsi_c, exhaustive, low_entropy (the control: elsi turned around), or a fixed rule: eagle2, eagle3,
    eagle3_engine, dflash, uniform."""
    size: int = 3
    """Number of layers in the set; eagle2 has 1, eagle3 and eagle3_engine have 3."""
    criterion: str = "entropy"
    """What is maximised: entropy (the paper), acceptance (predicted for the best linear draft, from the token sample,
    about 0.3 s a set; recommended, since it ranked trained drafts best), effective_rank, participation_ratio,
    coding_rate, dpp, mrmr, or a name that an installed package gives. Singles tie under dpp: give it a beam of all
    layers, or the exhaustive method."""
    beam: int = 10
    """Sets kept at each depth; exhaustive: best sets kept in the result. Fixed rules ignore it."""
    expand: int = 10
    """elsi and low_entropy only: extensions that each kept set may contribute."""
    pool: int = 5
    """elsi_c only: layers of greatest conditional transition that are tried from each kept set."""
    alpha: float = 1.0
    """entropy only: order of the Rényi entropy, greater than 0; inf is allowed."""
    weighting: Literal["raw", "trace"] = "raw"
    """raw: layers weigh by their norm, as in the paper; trace: every layer weighs the same. dpp and mrmr ignore it."""
    estimator: Literal["biased", "debiased"] = "biased"
    """elsi_c only: estimator of the CKA."""


def select(calibration: Calibration, settings: SelectionSettings = SelectionSettings()) -> Selection:
    """Run one method by name.

    Raises `LayerwaveError` for an unknown method, options out of range, a fixed rule that does not fit the size or the
    target, and states that are all zero or not finite.
    """
    s = settings
    common = {"alpha": s.alpha, "weighting": s.weighting, "criterion": s.criterion}
    match s.method:
        case "elsi":
            return elsi(calibration, s.size, s.beam, s.expand, **common)
        case "low_entropy":
            return elsi(calibration, s.size, s.beam, s.expand, objective="min", **common)
        case "elsi_c":
            return elsi_c(calibration, s.size, s.beam, s.pool, estimator=s.estimator, **common)
        case "exhaustive":
            return exhaustive(calibration, s.size, beam=s.beam, **common)
        case name if name in RULES:
            return fixed_rule(calibration, name, s.size, **common)
    raise LayerwaveError(f"unknown method {s.method!r}: choose from {', '.join(METHODS)}")


def settings_of(selection: Selection) -> SelectionSettings:
    """The settings that gave a selection, to run its method again.

    Raises `LayerwaveError` for options that no method has, or that are text: a file may hold anything.
    """
    options = {field.name for field in fields(SelectionSettings)} - {"method", "criterion"}
    texts = {"weighting", "estimator"}
    for name, value in selection.settings.items():
        if name not in options or isinstance(value, str) != (name in texts):
            raise LayerwaveError(f"the selection's option {name} = {value!r} is not one of a method: select again")
    return SelectionSettings(selection.method, criterion=selection.criterion, **selection.settings)


def fixed_rule(
    calibration: Calibration, name: str, size: int, alpha: float, weighting: str, criterion: str
) -> Selection:
    """The set of a fixed rule with its score, as a selection."""
    layers = baseline(name, calibration.num_layers, size)
    with warnings_kept() as warnings:
        criterion_name, score = make_criterion(calibration, criterion, alpha, weighting)
        sets = np.array([layers])
        beam = as_beam(sets, score(sets))
    return Selection(
        method=name,
        layers=layers,
        score=beam[0][1],
        num_layers=calibration.num_layers,
        calibration=calibration.fingerprint,
        criterion=criterion_name,
        settings={"size": size, "alpha": alpha, "weighting": weighting},
        beams=(beam,),
        parents=(((),),),
        warnings=tuple(warnings),
    )
