"""Question 1: the entropy of every layer set of a size."""

from itertools import combinations
from math import comb

import jax
import numpy as np

from layerwave.bench.answer import Answer, Bar
from layerwave.bench.literal import entropy_by_svd
from layerwave.bench.memory import peak_growth
from layerwave.bench.states import random_states
from layerwave.bench.timing import Side, Spread, require_equal, take_turns
from layerwave.doctor import usable_cores
from layerwave.kernels import gram, set_entropy


def entropy_of_triples(
    layers: int = 36,
    rows: int = 32,
    features: int = 2560,
    *,
    many_layers: int = 80,
    literal_sets: int = 50,
    repetitions: int = 5,
) -> Answer:
    """Entropies of all triples from the layers' Grams, beside SVDs of concatenations and numpy on ready Grams.

    `literal_sets` triples are done literally and extrapolated. Memory is that of all triples of `many_layers` layers
    against those of `layers` layers, both with the Grams of `many_layers`.

    Raises `LayerwaveError` when the ways disagree by 1e-9 nats or more.
    """
    states = random_states(layers, rows, features)
    wide = states.astype(np.float64)
    sets = np.array(list(combinations(range(layers), 3)))
    grams = gram(wide)
    summed = grams[sets].sum(axis=1)
    places = np.linspace(0, len(sets) - 1, min(literal_sets, len(sets))).astype(int)
    few = sets[places]
    share = len(few) / len(sets)

    def literally(vectors: bool) -> np.ndarray:
        return np.array([entropy_by_svd(wide, layers, vectors=vectors) for layers in few])

    def check(results: list) -> None:
        from_states, ready, _, *literal = results[:5]
        for name, found in (("the SVD's entropy", literal[0]), ("the thin SVD's entropy", literal[1])):
            require_equal(name, found, from_states[places], 1e-9)
        require_equal("the entropy on ready Grams", ready, from_states, 1e-9)

    sides = [
        Side("layerwave, from the states", lambda: set_entropy(gram(wide), sets)),
        Side("layerwave, on ready Grams", lambda: set_entropy(grams, sets)),
        Side("numpy.linalg.eigvalsh on ready Grams of the sets", lambda: np.linalg.eigvalsh(summed)),
        Side("literal: concatenate, singular values", lambda: literally(False), share),
        Side("literal: concatenate, thin SVD", lambda: literally(True), share),
    ]
    if jax.default_backend() != "cpu":
        given = jax.device_put(states)
        sides.append(Side("layerwave on the device, float32", lambda: set_entropy(gram(given), sets, chunk=8192)))
    timings = take_turns(sides, repetitions, check)
    host, ready, numpy, values, vectors, *device = timings
    ours = device[0] if device else host
    least = numpy.spread.median / usable_cores()
    at_most = (values.spread.median / least, vectors.spread.median / least)
    spectrum, svd = (1e6 * timing.spread.median / len(sets) for timing in (numpy, values))
    floor = (
        f"LAPACK takes {spectrum:.0f} µs for the eigenvalues of a {rows} x {rows} Gram on one core, {svd:.0f} µs for "
        f"the singular values of a concatenation. The eigenvalues alone, on {usable_cores()} cores, allow at most "
        f"{at_most[0]:,.0f} x (singular values) and {at_most[1]:,.0f} x (thin SVD)."
    )
    bars = [
        Bar("numpy's batched eigvalsh on ready Grams", numpy.times(ready), "at least", 1.0, "x", floor),
        Bar("the literal way by singular values", values.times(ours), "at least", 1000, "x", floor),
        Bar("the literal way by thin SVD", vectors.times(ours), "at least", 1000, "x", floor),
    ]
    growth = _growth(many_layers, rows, len(sets), repetitions)
    if growth is not None:
        triples = f"{comb(many_layers, 3):,} triples of {many_layers} layers: memory beyond that of {len(sets):,}"
        bars.append(Bar(triples, growth, "at most", 16, "MB"))
    return Answer(
        "1. Entropy of all triples",
        f"{len(sets):,} triples of {layers} layers, {rows} rows, {features:,} features",
        tuple(timings),
        tuple(bars),
        notes=(
            f"The literal ways do {len(few)} triples and are extrapolated to {len(sets):,}.",
            "numpy's side gets the summed Gram of every set ready; layerwave's sums them, and takes the logarithms.",
        ),
    )


def _growth(layers: int, rows: int, fewer: int, repetitions: int) -> Spread | None:
    """Peak megabytes of all triples less those of the first few, in turns."""
    grams = gram(random_states(layers, rows, rows).astype(np.float64))
    sets = np.array(list(combinations(range(layers), 3)))

    def peak(count: int) -> float | None:
        return peak_growth(lambda: set_entropy(grams, sets[:count]))

    if peak(len(sets)) is None or peak(fewer) is None:  # and compiled
        return None
    return Spread.of([peak(len(sets)) - peak(fewer) for _ in range(min(repetitions, 3))])
