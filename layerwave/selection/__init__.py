"""Which layers: a `Calibration` goes in, a `Selection` comes out."""

from layerwave.selection.acceptance import PredictedAcceptance, acceptance_criterion, predicted_acceptance
from layerwave.selection.acceptance_learning import LearningCurve, LearningPoint, learning_curve
from layerwave.selection.acceptance_scores import AcceptanceScores, Difference, ScoredSet
from layerwave.selection.acceptance_study import AcceptanceStudy, Rung, acceptance_study
from layerwave.selection.baselines import RULES, baseline, baselines, random_sets, rules
from layerwave.selection.beam import elsi, elsi_c
from layerwave.selection.cka_floor import CkaFloor, cka_floor
from layerwave.selection.comparison import ComparedSelection, Comparison, chooser, compare
from layerwave.selection.criteria import (
    CRITERIA,
    Criterion,
    coding_rate_criterion,
    dpp_criterion,
    effective_rank_criterion,
    entropy_criterion,
    mrmr_criterion,
    participation_ratio_criterion,
)
from layerwave.selection.decomposition import Decomposition, LayerPart, decompose
from layerwave.selection.diagnostics import Diagnostics, diagnose
from layerwave.selection.exhaustive import SetRank, exhaustive, rank_among_all
from layerwave.selection.gains import LayerGain, MarginalGains, marginal_gains
from layerwave.selection.methods import METHODS, SelectionSettings, select, settings_of
from layerwave.selection.overlap import BeamOverlap, RuleOverlap, beam_overlap
from layerwave.selection.result import Selection
from layerwave.selection.scores import make_criterion
from layerwave.selection.sensitivity import SensitivityRow, SensitivityTable, sensitivity
from layerwave.selection.sets import check_layers
from layerwave.selection.sinks import DominantPosition, SinkDominance, sink_dominance
from layerwave.selection.stability import ConvergencePoint, SetStability, Stability, stability
from layerwave.selection.transitions import Transitions, find_transitions

__all__ = [
    "CRITERIA",
    "METHODS",
    "RULES",
    "AcceptanceScores",
    "AcceptanceStudy",
    "BeamOverlap",
    "CkaFloor",
    "ComparedSelection",
    "Comparison",
    "ConvergencePoint",
    "Criterion",
    "Decomposition",
    "Diagnostics",
    "Difference",
    "DominantPosition",
    "LayerGain",
    "LayerPart",
    "LearningCurve",
    "LearningPoint",
    "MarginalGains",
    "PredictedAcceptance",
    "RuleOverlap",
    "Rung",
    "ScoredSet",
    "Selection",
    "SelectionSettings",
    "SensitivityRow",
    "SensitivityTable",
    "SetRank",
    "SetStability",
    "SinkDominance",
    "Stability",
    "Transitions",
    "acceptance_criterion",
    "acceptance_study",
    "baseline",
    "baselines",
    "beam_overlap",
    "check_layers",
    "chooser",
    "cka_floor",
    "coding_rate_criterion",
    "compare",
    "decompose",
    "diagnose",
    "dpp_criterion",
    "effective_rank_criterion",
    "elsi",
    "elsi_c",
    "entropy_criterion",
    "exhaustive",
    "find_transitions",
    "learning_curve",
    "make_criterion",
    "marginal_gains",
    "mrmr_criterion",
    "participation_ratio_criterion",
    "predicted_acceptance",
    "random_sets",
    "rank_among_all",
    "rules",
    "select",
    "sensitivity",
    "settings_of",
    "sink_dominance",
    "stability",
]
