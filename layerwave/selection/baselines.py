"""Layer sets that need no measurement: the fixed rules of EAGLE and DFlash, uniform spacing, random sets."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import comb

import numpy as np
from jaxtyping import Int

from layerwave.errors import LayerwaveError
from layerwave.selection.sets import check_count, check_size, sets_at


@dataclass(frozen=True)
class Rule:
    """A rule that names layers (0-based outputs) from the number of layers and the size of the set."""

    size: int | None
    """The one size that the rule has; None: any."""
    layers: Callable[[int, int], tuple[int, ...]]
    formula: str


def _dflash(num_layers: int, size: int) -> tuple[int, ...]:
    if size == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (size - 1)) for i in range(size))


RULES = {
    # The last layer, as EAGLE and EAGLE-2 read it.
    "eagle2": Rule(1, lambda n, m: (n - 1,), "[N-1]"),
    # EAGLE-3 as the paper indexes it: outputs of these layers.
    "eagle3": Rule(3, lambda n, m: (2, n // 2, n - 3), "[2, N//2, N-3]"),
    # What the engines' default ids capture, boundaries {2, N//2, N-3}, said as layer outputs.
    "eagle3_engine": Rule(3, lambda n, m: (1, n // 2 - 1, n - 4), "[1, N//2-1, N-4]"),
    # z-lab/dflash, build_target_layer_ids.
    "dflash": Rule(None, _dflash, "round(1 + i(N-4)/(m-1))"),
    # The middles of m equal parts of the depth.
    "uniform": Rule(None, lambda n, m: tuple((2 * i + 1) * n // (2 * m) for i in range(m)), "(2i+1)N // 2m"),
}


def rules(size: int) -> tuple[str, ...]:
    """Names of the fixed rules that give sets of this size."""
    return tuple(name for name, rule in RULES.items() if rule.size in (None, size))


def baseline(name: str, num_layers: int, size: int | None = None) -> tuple[int, ...]:
    """The layers of one fixed rule, sorted; `size` may be left out where the rule has only one.

    Raises `LayerwaveError` for an unknown rule, for a size that the rule does not have, and on a target so shallow
    that the rule repeats a layer or leaves the range: never a shorter set.
    """
    if name not in RULES:
        raise LayerwaveError(f"unknown rule {name!r}: choose from {', '.join(RULES)}")
    rule = RULES[name]
    if size is None and rule.size is None:
        raise LayerwaveError(f"the rule {name} has no size of its own: give one")
    size = rule.size if size is None else size
    if rule.size not in (None, size):
        raise LayerwaveError(f"the rule {name} gives {rule.size} layers, not {size}: ask for size {rule.size}")
    size = check_size(size, num_layers)
    layers = rule.layers(num_layers, size)
    inside = all(0 <= layer < num_layers for layer in layers)
    if not inside or any(a >= b for a, b in pairwise(layers)):
        fault = "repeats a layer or reverses their order" if inside else "leaves the range"
        raise LayerwaveError(
            f"the rule {name} = {rule.formula} gives {list(layers)} on {num_layers} layers and so {fault}: "
            "the target is too shallow for it, use another method"
        )
    return layers


def baselines(num_layers: int, size: int) -> dict[str, tuple[int, ...]]:
    """Every fixed rule of this size: name -> sorted layers (0-based outputs).

    Raises `LayerwaveError`, as `baseline` does, when a rule does not fit the target: a caller that wants the others
    asks for each of `rules(size)` by name.
    """
    return {name: baseline(name, num_layers, size) for name in rules(size)}


def random_sets(num_layers: int, size: int, count: int, seed: int) -> Int[np.ndarray, "{count} {size}"]:
    """`count` distinct sets of `size` layers, uniform over all, in the order drawn; the same for the same seed.

    Raises `LayerwaveError` when there are fewer than `count` sets.
    """
    size, count = check_size(size, num_layers), check_count("count", count)
    total = comb(num_layers, size)
    if count > total:
        raise LayerwaveError(f"{count} distinct sets asked for, but only {total} of size {size} exist: ask for fewer")
    return sets_at(np.array(random.Random(seed).sample(range(total), count)), num_layers, size)
