"""Which single positions are drawn, before any state is known: seeded, and the same however the samples are cut.

The sample's fingerprint decides on which side all its positions stand, fitting or scoring, and gives each of them a
priority. Each side takes its lowest priorities: a reservoir that needs no order, and whose parts merge exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt64

from layerwave.calibration.settings import CalibrationSettings
from layerwave.calibration.tokens import Batch

SKIPPED = 4
"""Positions at the start of a sample that are never drawn: they have next to no context (our decision)."""

_STREAM = 1
"""Sets these random words apart from those of `sample_weights`, which seed and fingerprint give as well."""


class TokenDraw(NamedTuple):
    """Q drawn positions, those that fit first, each side by priority; the last `scoring` of them score."""

    owners: Int64[np.ndarray, " Q"]
    """Index of each position's sample."""
    positions: Int32[np.ndarray, " Q"]
    """t, counted from 0 in its sample; t + 1 is in the sample as well."""
    priorities: UInt64[np.ndarray, " Q"]
    scoring: int


class BatchDraw(NamedTuple):
    """The drawn positions of one batch.

    where: row and position of each, padded with zeros to K.
    places: their places in the whole draw, not padded.
    """

    where: Int32[np.ndarray, "2 K"]
    places: Int64[np.ndarray, " _"]


def lowest(
    number: int,
    priorities: UInt64[np.ndarray, " Q"],
    samples: UInt64[np.ndarray, " Q"],
    positions: Int32[np.ndarray, " Q"],
) -> Int64[np.ndarray, " _"]:
    """Indices of the `number` lowest priorities, lowest first; equal ones by sample and position."""
    return np.lexsort((positions, samples, priorities))[:number]


def draw_positions(
    fingerprints: UInt64[np.ndarray, " S"], lengths: Sequence[int], settings: CalibrationSettings
) -> TokenDraw:
    """Draws `fit_positions` and `score_positions` of the samples, or all that there are; none without a token sample.

    A sample's first raw word of PCG64 makes it a scoring one with the probability that is the scoring side's share of
    the positions asked for; the next ones are the priorities of its positions from `SKIPPED` to the last but one.
    """
    asked = (settings.fit_positions, settings.score_positions)
    nothing = np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.int32), np.zeros(0, np.int64)
    sides = [nothing, nothing]  # priorities, fingerprints, positions and owners of each side's lowest so far
    for owner in range(len(fingerprints) if settings.token_sample else 0):
        number = max(0, lengths[owner] - 1 - SKIPPED)
        word, priorities = _words(settings.seed, fingerprints[owner], number)
        side = int((int(word) >> 11) * 2.0**-53 < asked[1] / sum(asked))
        new = (
            priorities,
            np.full(number, fingerprints[owner]),
            np.arange(SKIPPED, SKIPPED + number, dtype=np.int32),
            np.full(number, owner, np.int64),
        )
        joined = [np.concatenate(pair) for pair in zip(sides[side], new, strict=True)]
        kept = lowest(asked[side], *joined[:3])
        sides[side] = tuple(column[kept] for column in joined)
    priorities, _, positions, owners = (np.concatenate(columns) for columns in zip(*sides, strict=True))
    return TokenDraw(owners, positions, priorities, scoring=len(sides[1][0]))


def _words(seed: int, fingerprint: np.uint64, number: int) -> tuple[np.uint64, UInt64[np.ndarray, " {number}"]]:
    """One word for the side and `number` for the positions; numpy guarantees the stream in all versions."""
    words = np.random.PCG64([seed, int(fingerprint), _STREAM]).random_raw(1 + number)
    return words[0], words[1:]


def cut_into_batches(draw: TokenDraw, plan: Sequence[Batch]) -> list[BatchDraw]:
    """Where the drawn positions stand in each batch; K is one power of two for all batches of one shape (or 0).

    So a shape is compiled once, and mostly not again for another seed.
    """
    rows: list[Int[np.ndarray, " _"]] = []
    places = []
    for batch in plan:
        row_of = {owner: row for row, owner in enumerate(batch.samples)}
        places.append(np.flatnonzero(np.isin(draw.owners, batch.samples)))
        rows.append(np.array([row_of[owner] for owner in draw.owners[places[-1]]], np.int32))
    most: dict[tuple[int, ...], int] = {}
    for batch, found in zip(plan, places, strict=True):
        most[batch.tokens.shape] = max(most.get(batch.tokens.shape, 0), len(found))
    drawn = []
    for batch, found, row in zip(plan, places, rows, strict=True):
        number = most[batch.tokens.shape]
        where = np.zeros((2, 1 << (number - 1).bit_length() if number else 0), np.int32)
        where[:, : len(found)] = row, draw.positions[found]
        drawn.append(BatchDraw(where, found))
    return drawn
