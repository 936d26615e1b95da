"""Figures of what was measured, and the report in one HTML file."""

from layerwave.report.figures import (
    acceptance_curve,
    acceptance_ladder,
    acceptance_learning,
    acceptance_pairs,
    beam_tree,
    cka_filter_heatmaps,
    cka_heatmap,
    pair_heatmap,
    prompt_curves,
    prompt_variance,
    save_figure,
    target_curves,
    wave,
)
from layerwave.report.html import report_html, write_report

__all__ = [
    "acceptance_curve",
    "acceptance_ladder",
    "acceptance_learning",
    "acceptance_pairs",
    "beam_tree",
    "cka_filter_heatmaps",
    "cka_heatmap",
    "pair_heatmap",
    "prompt_curves",
    "prompt_variance",
    "report_html",
    "save_figure",
    "target_curves",
    "wave",
    "write_report",
]
