"""Everything that decides how drafts are trained, in one frozen dataclass (and the flags)."""

from dataclasses import dataclass
from typing import Literal

from layerwave.drafts.unroll import UnrollSettings
from layerwave.errors import LayerwaveError


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run; all layer sets of the run share them.

    Where nothing else is said the defaults are those of SpecForge and TorchSpec (EAGLE-3, arXiv 2503.01840).

    Raises:
        LayerwaveError: a value is out of its range; the message names the field.
    """

    epochs: float = 10.0
    """Passes over the training rows."""

    steps: int | None = None
    """Optimiser steps; by default what `epochs` makes."""

    batch_size: int = 8
    """Rows in a batch."""

    max_length: int = 2048
    """Tokens of a row, and of an example: longer ones are cut."""

    layout: Literal["packed", "padded"] = "packed"
    """As many examples in a row as fit, each attending to itself alone, or one."""

    learning_rate: float = 1e-4
    """Peak of AdamW's learning rate. 1e-4 suits drafts of targets of some billion parameters; narrow ones need more."""

    warmup: float = 0.015
    """Fraction of the steps over which the learning rate rises; then it falls to 0 along a cosine."""

    clip: float = 0.5
    """Largest global norm of each draft's gradient."""

    weight_decay: float = 0.0
    """Of AdamW, whose moments decay by 0.9 and 0.95."""

    ttt_steps: int = 7
    """Steps of the training-time test: how often the draft is fed its own output."""

    decay: float = 0.8
    """Step i of the training-time test weighs decay^i in the loss."""

    mean: Literal["masked", "all"] = "masked"
    """Mean of the loss over the positions under the mask, or over all (SafeAILab, SpecForge)."""

    draft_vocab_size: int | None = None
    """Tokens that the drafts can propose, the most frequent ones; by default 32,000, or the target's vocabulary."""

    held_out: float = 0.05
    """Fraction of the examples that is kept for evaluation, chosen by a hash of their tokens."""

    evaluate_every: int = 500
    """Steps between evaluations on the held-out examples; there is always one at the end."""

    checkpoint_every: int = 500
    """Steps between checkpoints."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the drafts' activations and products. Parameters and moments are float32 in any case."""

    norm_before_residual: bool = False
    """Add the attention to the normed features (speculators' default) instead of to the features as they came."""

    norm_before_fc: bool = False
    """Norm the concatenated states before fc."""

    fc_norm: bool = False
    """Norm each layer's states by themselves before fc (EAGLE-3.1)."""

    norm_output: bool = False
    """Feed the final-normed output to the next step (EAGLE-3.1)."""

    seed: int = 0
    """Seed of the drafts' first parameters and of the order of the rows."""

    def __post_init__(self) -> None:
        _require(0 < self.epochs < float("inf"), "epochs", self.epochs, "a number > 0")
        for field in ("batch_size", "max_length", "ttt_steps", "evaluate_every", "checkpoint_every"):
            _require(_whole(getattr(self, field), 1), field, getattr(self, field), "a whole number >= 1")
        for field in ("steps", "draft_vocab_size"):
            value = getattr(self, field)
            _require(value is None or _whole(value, 1), field, value, "a whole number >= 1")
        _require(0 < self.learning_rate < float("inf"), "learning_rate", self.learning_rate, "a number > 0")
        _require(0 <= self.warmup < 1, "warmup", self.warmup, "a fraction in [0, 1)")
        _require(0 < self.clip < float("inf"), "clip", self.clip, "a number > 0")
        _require(0 <= self.weight_decay < float("inf"), "weight_decay", self.weight_decay, "a number >= 0")
        _require(0 < self.decay <= 1, "decay", self.decay, "a number in (0, 1]")
        _require(0 <= self.held_out < 1, "held_out", self.held_out, "a fraction in [0, 1)")
        _require(self.layout in ("packed", "padded"), "layout", self.layout, "packed or padded")
        _require(self.mean in ("masked", "all"), "mean", self.mean, "masked or all")
        _require(self.dtype in ("float32", "bfloat16"), "dtype", self.dtype, "float32 or bfloat16")
        _require(_whole(self.seed, 0), "seed", self.seed, "a whole number >= 0")

    @property
    def unroll(self) -> UnrollSettings:
        return UnrollSettings(self.ttt_steps, self.decay, self.mean, self.dtype)

    @property
    def options(self) -> dict[str, bool]:
        """Fields of `DraftConfig` that differ from its defaults or may do so."""
        return {name: getattr(self, name) for name in OPTIONS}


OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FREE = ("checkpoint_every", "evaluate_every")
"""Fields that a resumed run may change: they do not reach the parameters."""


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _require(holds: bool, field: str, got: object, expected: str) -> None:
    if not holds:
        raise LayerwaveError(f"{field} is {got!r}, but must be {expected}: pass another {field}")
