"""The draft vocabulary: the target's tokens that a draft can propose, and the two tables that engines read."""

import hashlib
from dataclasses import dataclass

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int64, Integer

from layerwave.errors import LayerwaveError
from layerwave.selection.sets import check_count


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Target ids of the draft's tokens; draft token `i` is target token `tokens[i]`.

    Raises `LayerwaveError` unless the ids ascend and lie in the target's vocabulary of `target_size` tokens.
    """

    tokens: Integer[np.ndarray, " Vd"]
    """Kept as int32."""
    target_size: int

    def __post_init__(self) -> None:
        given = np.asarray(self.tokens)
        if given.ndim != 1 or not len(given) or not np.issubdtype(given.dtype, np.integer):
            raise LayerwaveError(
                f"a draft vocabulary of {given.dtype} with shape {given.shape}: expected a list of target ids"
            )
        if (np.diff(given.astype(np.int64)) <= 0).any():
            raise LayerwaveError("the target ids of the draft vocabulary must ascend strictly: sort them, each once")
        if given[0] < 0 or given[-1] >= self.target_size:
            raise LayerwaveError(
                f"the draft vocabulary holds the target ids {given[0]} … {given[-1]}, but the target has "
                f"0 … {self.target_size - 1}: it belongs to another target"
            )
        object.__setattr__(self, "tokens", given.astype(np.int32))

    @classmethod
    def from_counts(cls, counts: Integer[np.ndarray, " V"], size: int) -> "DraftVocabulary":
        """The `size` tokens that occur most often; of equally frequent ones the lower ids.

        So where fewer than `size` tokens occur at all, the lowest of the others fill up.

        Raises:
          LayerwaveError: a size that is not between 1 and V, or counts of nothing.
        """
        size = check_count("the size of the draft vocabulary", size)
        if size > len(counts):
            raise LayerwaveError(
                f"the size of the draft vocabulary is {size}, but the target has {len(counts)} tokens: choose at most "
                "as many"
            )
        if not counts.any() or counts.min() < 0:
            raise LayerwaveError(
                f"the counts of tokens sum to {counts.sum()} with the least {counts.min()}, but must count something: "
                "check that the loss mask covers the answers"
            )
        frequent = np.argsort(-counts.astype(np.int64), kind="stable")[:size]
        return cls(np.sort(frequent), len(counts))

    @classmethod
    def from_d2t(
        cls, d2t: Integer[np.ndarray, " Vd"], t2d: Bool[np.ndarray, " V"] | None, target_size: int
    ) -> "DraftVocabulary":
        """From the tables of a checkpoint; `t2d` is only compared, since some formats lack it.

        Raises:
          LayerwaveError: offsets that do not give ascending ids of the target, or a `t2d` that says otherwise.
        """
        if d2t.ndim != 1 or d2t.dtype.kind != "i":
            raise LayerwaveError(f"d2t is {d2t.dtype} of shape {d2t.shape}: expected a list of signed whole numbers")
        try:
            vocabulary = cls(np.arange(len(d2t)) + d2t, target_size)
        except LayerwaveError as error:
            raise LayerwaveError(
                f"d2t does not hold offsets (target id = draft id + d2t[draft id]): {error}"
            ) from error
        if t2d is not None and not np.array_equal(t2d, vocabulary.t2d):
            raise LayerwaveError(
                f"t2d marks {int(t2d.sum())} of {len(t2d)} tokens, d2t names {len(d2t)} of {target_size}, and the two "
                "do not agree: the tables come from different vocabularies"
            )
        return vocabulary

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def d2t(self) -> Int64[np.ndarray, " Vd"]:
        """Offsets: target id = draft id + d2t[draft id]."""
        return self.tokens - np.arange(self.size, dtype=np.int64)

    @property
    def t2d(self) -> Bool[np.ndarray, " V"]:
        """Which of the target's tokens the draft has."""
        marks = np.zeros(self.target_size, bool)
        marks[self.tokens] = True
        return marks

    @property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of the target's size and the ids."""
        return hashlib.sha256(np.array([self.target_size, *self.tokens], "<i8").tobytes()).hexdigest()

    def restrict(self, head: Float[Array, "V D"] | Float[np.ndarray, "V D"]) -> ArrayLike:
        """Rows of the target's head for the draft's tokens, `(Vd, D)`.

        Raises:
          LayerwaveError: a head over another vocabulary.
        """
        if len(head) != self.target_size:
            raise LayerwaveError(
                f"a head over {len(head)} tokens for a draft vocabulary over {self.target_size}: they belong to "
                "different targets"
            )
        return head[self.tokens]
