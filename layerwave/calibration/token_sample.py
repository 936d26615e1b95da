"""A sample of single positions with the states of all layers: what predicted acceptance is fitted and scored on.

Every position of every sample has a priority that follows from the seed, the sample's fingerprint and the position
alone, and the lowest ones are taken. So the draw does not depend on order, batches or processes, and the samples of
two disjoint calibrations merge into the one of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, UInt64

from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.token_draw import lowest

TOP_TOKENS = 8
"""Most probable tokens that every scoring position brings into the vocabulary."""


@dataclass(frozen=True, eq=False)
class TokenSample:
    """States, embeddings and targets at Q drawn positions t, the fitting ones first, each part by priority.

    Letters: N layers, Q positions of which n fit and n' score, W width of the kept states (D, or less when they were
    projected), D features, R tokens of the vocabulary.

    Arrays of states are float32, or bfloat16 where float32 would not fit into `token_megabytes`. All drawn positions
    are here; whether attention sinks are used is for the reader, by the settings (`used`).
    """

    states: Float[np.ndarray, "N Q W"]
    """State of each layer at t, the last one as `final_state` says; projected by a seeded Gaussian matrix if W < D."""
    embeddings: Float[np.ndarray, "Q D"]
    """Embedding of the token at t + 1, as the model has it."""
    normed: Float[np.ndarray, "Q D"]
    """Final-normed last state at t + 1: what the head reads to predict the token at t + 2."""
    head: Float[np.ndarray, "R D"]
    """Rows of the head for `vocabulary`."""
    vocabulary: Int32[np.ndarray, " R"]
    """Union of `top_tokens`, ascending."""
    top_tokens: Int32[np.ndarray, "n_score k"]
    """The most probable tokens of the target at t + 1, for the scoring positions only, most probable first."""
    log_normaliser: Float32[np.ndarray, " n_score"]
    """`log Σ_v exp(w_v · y)` over the target's whole vocabulary, for the scoring positions: tells what mass
    `vocabulary` covers."""
    samples: UInt64[np.ndarray, " Q"]
    """Fingerprint of each position's sample. No sample stands on both sides."""
    positions: Int32[np.ndarray, " Q"]
    """t, counted from 0 in its sample."""
    priorities: UInt64[np.ndarray, " Q"]
    sinks: Bool[np.ndarray, " Q"]
    """Whether t is an attention sink."""

    @property
    def scoring(self) -> Bool[np.ndarray, " Q"]:
        """The positions that score: the last ones."""
        return np.arange(len(self.positions)) >= len(self.positions) - len(self.top_tokens)

    @property
    def fitting(self) -> Bool[np.ndarray, " Q"]:
        """The positions that fit."""
        return ~self.scoring

    def used(self, sinks: Literal["keep", "drop"]) -> Bool[np.ndarray, " Q"]:
        """The positions that are left when attention sinks are treated as `CalibrationSettings.sinks` says."""
        return ~self.sinks if sinks == "drop" else np.ones_like(self.sinks)

    @property
    def megabytes(self) -> float:
        """Size of the states, embeddings and targets."""
        return sum(array.nbytes for array in (self.states, self.embeddings, self.normed, self.head)) / 1e6

    def summary(self, settings: CalibrationSettings) -> dict[str, int]:
        """Numbers of drawn positions beside those asked for, and the size."""
        width = self.states.shape[2]
        projected = f", states projected to width {width}" if width < self.embeddings.shape[1] else ""
        return {
            f"of {settings.fit_positions:,} positions drawn to fit predicted acceptance": int(self.fitting.sum()),
            f"of {settings.score_positions:,} positions drawn to score it": int(self.scoring.sum()),
            "attention sinks among them": int(self.sinks.sum()),
            f"megabytes of token sample in {self.states.dtype.name}{projected}": round(self.megabytes),
        }

    @classmethod
    def merge(cls, parts: Sequence["TokenSample"], settings: CalibrationSettings) -> "TokenSample":
        """The sample of all positions together, from those of disjoint parts with the same settings and target."""
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts], axis=axis)
            for name, axis in _BY_POSITION.items()
        }
        scoring = np.concatenate([part.scoring for part in parts])
        fit, score = (
            side[lowest(number, *(columns[name][side] for name in ("priorities", "samples", "positions")))]
            for side, number in (
                (np.flatnonzero(~scoring), settings.fit_positions),
                (np.flatnonzero(scoring), settings.score_positions),
            )
        )
        # `top_tokens` and `log_normaliser` have rows for scoring positions only.
        row = (np.cumsum(scoring) - 1)[score]
        top_tokens = np.concatenate([part.top_tokens for part in parts])[row]
        vocabulary = np.unique(top_tokens)
        known, first = np.unique(np.concatenate([part.vocabulary for part in parts]), return_index=True)
        head = np.concatenate([part.head for part in parts])[first]
        return cls(
            **{name: columns[name].take(np.append(fit, score), axis=axis) for name, axis in _BY_POSITION.items()},
            head=head[np.searchsorted(known, vocabulary)],
            vocabulary=vocabulary,
            top_tokens=top_tokens,
            log_normaliser=np.concatenate([part.log_normaliser for part in parts])[row],
        )


# Arrays with one entry a position, and on which axis.
_BY_POSITION = {"states": 1, "embeddings": 0, "normed": 0, "samples": 0, "positions": 0, "priorities": 0, "sinks": 0}
