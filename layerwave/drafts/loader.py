"""Examples to batches of one static shape: rows padded or packed once, visited in a seeded order.

A row is a whole number of examples that never changes, so that a row's hidden states can be stored and read back. The
order of rows is a function of seed and step alone: the loader's state is the step, and a run resumed from it sees what
an uninterrupted one would have seen. More processes would share the work by `order[rank::processes]`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import grain
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from layerwave.drafts.examples import Example, Examples
from layerwave.errors import LayerwaveError

MULTIPLE = 64
"""Rows are as long as the longest needs to be, rounded up to this many tokens."""
PADDING = -1
"""Stands in `documents` where no example is."""


class Batch(NamedTuple):
    """Rows of tokens, as numpy or jax arrays.

    loss_mask: tokens that the draft shall learn to predict. positions: count from 0 in every document.
    documents: index of the example that each token belongs to, `PADDING` where there is none.
    """

    tokens: Int32[np.ndarray, "b T"] | Int32[Array, "b T"]
    loss_mask: Bool[np.ndarray, "b T"] | Bool[Array, "b T"]
    positions: Int32[np.ndarray, "b T"] | Int32[Array, "b T"]
    documents: Int32[np.ndarray, "b T"] | Int32[Array, "b T"]


def split(examples: Examples, held_out: float) -> tuple[Examples, Examples]:
    """Examples to train on, and about the fraction `held_out` of them to evaluate on.

    The hash of an example's tokens decides alone, so that more data or another order move none across.

    Raises:
        LayerwaveError: no example fell on one of the sides.
    """
    chosen = [float(row.fingerprint) / 2.0**64 < held_out for row in examples.rows]
    if all(chosen) or (held_out and not any(chosen)):
        raise LayerwaveError(
            f"held_out={held_out:g} leaves {sum(chosen)} of {len(chosen)} examples to evaluate on and "
            f"{len(chosen) - sum(chosen)} to train on: give more conversations or another held_out"
        )
    sides = (tuple(r for r, held in zip(examples.rows, chosen, strict=True) if held == side) for side in (False, True))
    train, test = (replace(examples, rows=rows) for rows in sides)
    return train, test


@dataclass(frozen=True)
class Rows:
    """Which examples stand in which row.

    plan: indices of examples, one tuple a row. length: tokens of a row, padding included.
    """

    examples: Sequence[Example]
    plan: tuple[tuple[int, ...], ...]
    length: int

    @classmethod
    def lay(cls, examples: Sequence[Example], max_length: int, *, packed: bool) -> "Rows":
        """One example a row, or as many as fit.

        Raises:
            LayerwaveError: an example is longer than `max_length` tokens.
        """
        lengths = [len(example.tokens) for example in examples]
        longest = max(lengths, default=0)
        if longest > max_length:
            raise LayerwaveError(
                f"{examples[lengths.index(longest)].where}: {longest} tokens, but max_length is {max_length}: "
                "make the examples with the same max_length"
            )
        if not packed:
            return cls(examples, tuple((i,) for i in range(len(examples))), min(max_length, _round_up(longest)))
        length = min(max_length, _round_up(sum(lengths)))
        return cls(examples, _best_fit(examples, length), length)

    def batch(self, rows: Sequence[int] | Int[np.ndarray, " b"]) -> Batch:
        """The rows of these numbers; `PADDING` gives a row without an example."""
        shape = (len(rows), self.length)
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        positions, documents = np.zeros(shape, np.int32), np.full(shape, PADDING, np.int32)
        for r, row in enumerate(rows):
            start = 0
            for index in self.plan[row] if row != PADDING else ():
                example = self.examples[index]
                span = np.s_[r, start : start + len(example.tokens)]
                tokens[span], mask[span], documents[span] = example.tokens, example.loss_mask, index
                positions[span] = np.arange(len(example.tokens))
                start += len(example.tokens)
        return Batch(tokens, mask, positions, documents)

    def shuffled(self, batch_size: int, steps: int, seed: int) -> grain.MapDataset:
        """Row numbers of the batch of every step; each pass over the rows in another order.

        Raises:
            LayerwaveError: a batch of more rows than there are.
        """
        if batch_size > len(self.plan):
            raise LayerwaveError(
                f"batch_size is {batch_size}, but the data make {len(self.plan)} rows of {self.length} tokens: "
                "pass a smaller batch_size or max_length, or give more conversations"
            )
        passes = -(-steps * batch_size // len(self.plan))
        rows = grain.MapDataset.range(len(self.plan)).seed(seed).shuffle().repeat(passes)
        return rows.batch(batch_size)[:steps]

    def in_order(self, batch_size: int) -> Iterator[Int[np.ndarray, " b"]]:
        """Row numbers of one pass over all rows; the last batch is filled with `PADDING`."""
        for first in range(0, len(self.plan), batch_size):
            rows = np.arange(first, first + batch_size)
            yield np.where(rows < len(self.plan), rows, PADDING)


def attention_mask(documents: Int32[Array, "b T"]) -> Bool[Array, "b T T"]:
    """Which tokens each token attends to: itself and those before it of the same document."""
    order = jnp.arange(documents.shape[1], dtype=jnp.int32)
    causal = order[None, None, :] <= order[None, :, None]
    return causal & (documents[:, :, None] == documents[:, None, :])


def _round_up(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def _best_fit(examples: Sequence[Example], capacity: int) -> tuple[tuple[int, ...], ...]:
    """Bins of at most `capacity` tokens: each example into the fullest bin that has room.

    They come in the order of their hashes. The longest first would fill the bins better, but long examples are of one
    kind and short ones of another, and so would the rows be, and the gradients of batches of them.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(examples)), key=lambda i: examples[i].fingerprint):
        size = len(examples[index].tokens)
        place = bisect_left(room, (size, 0))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(room, (left - size, row))
    return tuple(tuple(sorted(row)) for row in rows)
