"""Everything that decides what a calibration measures, in one frozen dataclass (and the flags)."""

from dataclasses import dataclass
from typing import Literal

from layerwave.errors import LayerwaveError

POOLS = (("filtered", "keep"), ("filtered", "drop"), ("unfiltered", "keep"), ("unfiltered", "drop"))
"""Order of the pool axis P: all tokens or those the entropy filter left, with attention sinks or without."""


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of one calibration pass; the defaults are the paper's (arXiv 2610.12939, section 4).

    All are recorded in the artifact. Where the paper is silent the field says that it is our decision.

    Raises:
        LayerwaveError: a value is out of its range; the message names the field.
    """

    rho: float = 0.3
    """Fraction of each sample's tokens kept by the entropy filter, in (0, 1]; 1 switches the filter off."""

    block: int = 32
    """Tokens in a block: the number of rows of every layer's averaged state."""

    samples: int = 200
    """Conversations to use; when there are more, a permutation from the seed decides which (our decision)."""

    max_length: int = 2048
    """Tokens of a conversation that are used, from its start; the rest is cut and counted."""

    final_state: Literal["pre_norm", "post_norm"] = "pre_norm"
    """Take the last layer's output before the final norm (our decision) or after it (Hugging Face)."""

    sinks: Literal["keep", "drop"] = "keep"
    """Keep attention sinks (the paper's reading), or drop them after the filter and before blocks are cut."""

    sink_multiple: float = 10.0
    """A sink's norm exceeds this multiple of the sample's median norm in any layer (our decision)."""

    seed: int = 0
    """Seed of the permutation that chooses the samples, of the bootstrap's weights, and of the token sample."""

    replicates: int = 32
    """Poisson bootstrap replicates kept for the stability of the selection; 0 switches them off (our decision)."""

    replicate_megabytes: float = 256.0
    """Largest size of the replicates' sums that the artifact keeps. Larger ones leave only their Grams, which serve
    the stability but cannot be merged with another calibration's."""

    token_sample: bool = True
    """Keep the states of all layers at single positions, from which predicted acceptance is computed."""

    fit_positions: int = 2048
    """Positions on which predicted acceptance is fitted (our decision)."""

    score_positions: int = 1024
    """Positions on which it is scored, of other conversations than those that fit (our decision)."""

    token_megabytes: float = 256.0
    """Largest size of the token sample. Where float32 does not fit, it is kept in bfloat16; where that does not fit
    either, the states are projected by a seeded Gaussian matrix to the greatest width that does."""

    def __post_init__(self) -> None:
        _require(0 < self.rho <= 1, "rho", self.rho, "a fraction in (0, 1]")
        _require(_whole(self.block) and self.block >= 1, "block", self.block, "a whole number of tokens >= 1")
        for name in ("samples", "fit_positions", "score_positions"):
            value = getattr(self, name)
            _require(_whole(value) and value >= 1, name, value, "a whole number >= 1")
        _require(
            _whole(self.max_length) and self.max_length >= self.block,
            "max_length",
            self.max_length,
            f"a whole number of tokens >= block ({self.block})",
        )
        _require(
            self.final_state in ("pre_norm", "post_norm"),
            "final_state",
            self.final_state,
            "pre_norm or post_norm",
        )
        _require(self.sinks in ("keep", "drop"), "sinks", self.sinks, "keep or drop")
        _require(1 < self.sink_multiple < float("inf"), "sink_multiple", self.sink_multiple, "a number > 1")
        _require(_whole(self.seed) and self.seed >= 0, "seed", self.seed, "a whole number >= 0")
        _require(_whole(self.replicates) and self.replicates >= 0, "replicates", self.replicates, "a whole number >= 0")
        _require(self.replicate_megabytes >= 0, "replicate_megabytes", self.replicate_megabytes, "a number >= 0")
        _require(isinstance(self.token_sample, bool), "token_sample", self.token_sample, "True or False")
        _require(self.token_megabytes > 0, "token_megabytes", self.token_megabytes, "a number > 0")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, field: str, got: object, expected: str) -> None:
    if not holds:
        raise LayerwaveError(f"{field} is {got!r}, but must be {expected}: pass another {field}")
