"""Figures of what was measured, each a function that returns a matplotlib `Figure` of one column's width."""

from layerwave.report.figures.acceptance import (
    acceptance_curve,
    acceptance_ladder,
    acceptance_learning,
    acceptance_pairs,
)
from layerwave.report.figures.acceptance_lengths import acceptance_lengths
from layerwave.report.figures.beams import beam_tree
from layerwave.report.figures.cka import cka_filter_heatmaps, cka_heatmap
from layerwave.report.figures.curves import (
    PromptVariance,
    depth_parts,
    prompt_curves,
    prompt_variance,
    target_curves,
    variance_over_prompts,
)
from layerwave.report.figures.draft_tree import draft_tree
from layerwave.report.figures.pairs import pair_heatmap
from layerwave.report.figures.style import save_figure
from layerwave.report.figures.wave import wave

__all__ = [
    "PromptVariance",
    "acceptance_curve",
    "acceptance_ladder",
    "acceptance_learning",
    "acceptance_lengths",
    "acceptance_pairs",
    "beam_tree",
    "cka_filter_heatmaps",
    "cka_heatmap",
    "depth_parts",
    "draft_tree",
    "pair_heatmap",
    "prompt_curves",
    "prompt_variance",
    "save_figure",
    "target_curves",
    "variance_over_prompts",
    "wave",
]
