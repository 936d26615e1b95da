"""Layer sets: their checks, their enumeration, and the one order in which scored sets stand."""

import operator
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import comb

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from layerwave.errors import LayerwaveError
from layerwave.files.reading import shown

# Scores nearer than this are tied. Float64 rounding of a score is about 1e-14, so sets that are equal in
# exact arithmetic (copies of a layer, say) are ordered by their layers and not by noise or by device.
TIE = 1e-12


def check_count(name: str, value: object) -> int:
    """The option `name` as an int. Raises `LayerwaveError` unless it is a whole number of at least 1."""
    count = _whole(name, value)
    if count < 1:
        raise LayerwaveError(f"{name} is {count}: it must be at least 1")
    return count


def join(numbers: Iterable[int]) -> str:
    """Layers or boundaries in a sentence or table, as `5,23,34`."""
    return ",".join(map(str, numbers))


def check_size(size: object, num_layers: int) -> int:
    """The size as an int. Raises `LayerwaveError` unless sets of that many layers can be chosen from `num_layers`."""
    count = _whole("the size of the layer set", size)
    if not 1 <= count <= num_layers:
        raise LayerwaveError(
            f"the size of the layer set is {count}: choose between 1 and the number of layers, {num_layers}"
        )
    return count


def _whole(name: str, value: object) -> int:
    try:
        return _index(value)
    except TypeError:
        raise LayerwaveError(f"{name} is {shown(value)}: it must be a whole number") from None


def _index(value: object) -> int:
    """The value as an int; True and False, which Python takes for 1 and 0, are none."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def check_layers(layers: Iterable, num_layers: int) -> tuple[int, ...]:
    """The layers as a sorted tuple of ints.

    Raises `LayerwaveError` for an empty set, a layer that is not an integer, is out of range, or is repeated.
    """
    given = list(layers)
    try:
        found = tuple(sorted(_index(layer) for layer in given))
    except TypeError:
        raise LayerwaveError(f"layers {shown(given)}: every layer must be an integer, 0 … {num_layers - 1}") from None
    if not found:
        raise LayerwaveError("the layer set is empty: name at least one layer")
    outside = [layer for layer in found if not 0 <= layer < num_layers]
    if outside:
        raise LayerwaveError(
            f"layer {outside[0]} is out of range: the target's layers are 0 … {num_layers - 1} (outputs, 0-based)"
        )
    repeated = [a for a, b in pairwise(found) if a == b]
    if repeated:
        raise LayerwaveError(f"layer {repeated[0]} is repeated in {shown(given)}: name each layer once")
    return found


def ranking(
    scores: Float[np.ndarray, "M"], sets: Integer[np.ndarray, "M m"], groups: Integer[np.ndarray, "M"] | None = None
) -> Int[np.ndarray, "M"]:
    """Order of sets, best first: greater score, then the lexicographically smaller set.

    Scores stand in one tier with the next greater score when they differ by at most `TIE`. With `groups`, whole groups
    follow each other in ascending order, each ranked by itself.
    """
    groups = np.zeros(len(scores), dtype=np.int64) if groups is None else groups
    descending = np.lexsort((-scores, groups))
    step = (np.diff(groups[descending]) > 0) | (-np.diff(scores[descending]) > TIE)
    tier = np.empty(len(scores), dtype=np.int64)
    tier[descending] = np.cumsum(np.concatenate([np.zeros(1, dtype=bool), step]))
    return np.lexsort((*sets.T[::-1], tier))


def place_in_group(groups: Integer[np.ndarray, "M"]) -> Int[np.ndarray, "M"]:
    """Place of each element within its group, from 0; groups are ascending."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def sets_at(ranks: Int[np.ndarray, "M"], num_layers: int, size: int) -> Int[np.ndarray, "M {size}"]:
    """The sets that stand at these places (0-based) among all sets of `size` layers in lexicographic order.

    Combinatorial number system on the complement: each step finds the greatest `c` with `C(c, k) <= rest`.
    """
    if comb(num_layers, size) >= 2**63:
        raise LayerwaveError(f"there are more than 2^63 sets of {size} of {num_layers} layers: choose a smaller size")
    rest = comb(num_layers, size) - 1 - ranks
    sets = np.empty((len(ranks), size), dtype=np.int64)
    for column in range(size):
        binomials = np.array([comb(c, size - column) for c in range(num_layers)], dtype=np.int64)
        c = np.searchsorted(binomials, rest, side="right") - 1
        sets[:, column] = num_layers - 1 - c
        rest = rest - binomials[c]
    return sets


def all_sets(num_layers: int, size: int, block: int = 16384) -> Iterator[Int[np.ndarray, "_ {size}"]]:
    """All `C(num_layers, size)` sets in lexicographic order, in blocks, so that memory stays bounded."""
    total = comb(num_layers, size)
    for start in range(0, total, block):
        yield sets_at(np.arange(start, min(start + block, total)), num_layers, size)


def eligible(sets: Integer[np.ndarray, "M m"], num_layers: int) -> Bool[np.ndarray, "M"]:
    """Which sets may be the final choice: all, but a single layer must lie after the middle, `l > N // 2`.

    The paper's rule for `m = 1` (the first layer of its Llama has high entropy). It does not limit the seeds of
    larger sets. Raises `LayerwaveError` when no single layer lies after the middle (`N < 3`).
    """
    if sets.shape[1] > 1:
        return np.ones(len(sets), dtype=bool)
    allowed = sets[:, 0] > num_layers // 2
    if not allowed.any():
        raise LayerwaveError(
            f"a single layer must lie after the middle, and none of the {num_layers} layers does: use at least 3"
        )
    return allowed
