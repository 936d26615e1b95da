"""Questions 2 and 3: CKA between all layers, and conditioned on the sets of a beam."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float

from layerwave.bench.answer import Answer, Bar
from layerwave.bench.literal import cka_by_pairs, conditional_by_grams, conditional_by_pairs
from layerwave.bench.states import random_states
from layerwave.bench.timing import Side, require_equal, take_turns
from layerwave.kernels import cka, conditional_cka, conditional_cka_from_table, gram_table
from layerwave.kernels.cka import Estimator


@dataclass(frozen=True)
class Peer:
    """Another tool's CKA between all layers."""

    name: str
    estimator: Estimator
    run: Callable[[Float[np.ndarray, "N B D"]], Float[np.ndarray, "N N"]]
    """Of float32 states."""
    tolerance: float
    """How far its values may lie from layerwave's."""


def pairwise_similarity(
    layers: int = 36, rows: int = 32, features: int = 2560, *, peers: Sequence[Peer] = (), repetitions: int = 5
) -> Answer:
    """CKA of all pairs of layers, biased and debiased, beside loops over pairs and peers.

    Raises `LayerwaveError` when a peer's values, or those of the loops, are not layerwave's.
    """
    states = random_states(layers, rows, features)
    wide = states.astype(np.float64)
    loops = Peer("literal: both Grams of every pair", "biased", lambda _: cka_by_pairs(wide), 1e-9)
    compared = (loops, *peers)

    def check(results: list) -> None:
        ours = dict(zip(("biased", "debiased"), results, strict=False))
        for peer, found in zip(compared, results[2:], strict=False):
            require_equal(f"{peer.name}: CKA", found, ours[peer.estimator], peer.tolerance)

    sides = [
        Side("layerwave, biased", lambda: cka(states)),
        Side("layerwave, debiased", lambda: cka(states, "debiased")),
        *(Side(f"{peer.name}, {peer.estimator}", lambda peer=peer: peer.run(states)) for peer in compared),
        Side("numpy: the states in float64, and their products alone", lambda: _products(states)),
    ]
    if jax.default_backend() != "cpu":
        given, on_device = jax.device_put(states), jax.jit(cka)
        sides.append(Side("layerwave on the device, biased, float32", lambda: on_device(given)))
    timings = take_turns(sides, repetitions, check)
    biased, debiased, by_pairs, *by_peers = timings[: 3 + len(peers)]
    products = timings[3 + len(peers)].spread.median
    why = (
        f"The states in float64 and their {layers} products with themselves alone take numpy {1e3 * products:.1f} ms, "
        f"{products / biased.spread.median:.0%} of layerwave's time."
    )
    bars = [
        Bar("loops over pairs", by_pairs.times(biased), "at least", 100, "x", why),
        Bar("debiased against biased", debiased.times(biased), "at most", 2, "x"),
    ]
    if peers:
        ours = {"biased": biased, "debiased": debiased}
        fastest, peer = min(zip(by_peers, peers, strict=True), key=lambda pair: pair[0].spread.median)
        claim = f"the fastest peer, {peer.name}"
        bars.insert(0, Bar(claim, fastest.times(ours[peer.estimator]), "at least", 3, "x", why))
    return Answer(
        "2. CKA between all layers",
        f"{layers} layers, {rows} rows, {features:,} features, float32 states",
        tuple(timings),
        tuple(bars),
        notes=("layerwave forms its Grams in float64.",),
    )


def _products(states: Float[np.ndarray, "N B D"]) -> Float[np.ndarray, "N B B"]:
    wide = states.astype(np.float64)
    return wide @ wide.swapaxes(1, 2)


def conditional_similarity(
    layers: int = 36,
    rows: int = 32,
    features: int = 2560,
    *,
    beam: int = 10,
    literal_pairs: int = 40,
    repetitions: int = 5,
) -> Answer:
    """Conditional CKA of the pairs in a beam, beside the same from concatenations.

    `literal_pairs` pairs of layers are done literally for one set, and extrapolated to all pairs of all sets.
    Raises `LayerwaveError` when the ways differ by 1e-9 or more.
    """
    states = random_states(layers, rows, features)
    wide = states.astype(np.float64)
    rng = np.random.default_rng(0)
    sets = np.sort(np.array([rng.choice(layers, 2, replace=False) for _ in range(beam)]), axis=1)
    pairs = rng.integers(0, layers, (literal_pairs, 2))
    table = gram_table(states)

    def check(results: list) -> None:
        ours, from_table, by_pairs, by_grams = results
        require_equal("conditional CKA from the table", from_table, ours, 1e-9)
        require_equal("conditional CKA from concatenations", by_pairs, ours[0][tuple(pairs.T)], 1e-9)
        require_equal("conditional CKA from their Grams", by_grams, ours[0], 1e-9)

    share = literal_pairs / (beam * layers**2)
    timings = take_turns(
        [
            Side("layerwave, from the states", lambda: conditional_cka(states, sets)),
            Side("layerwave, from the table that a search keeps", lambda: conditional_cka_from_table(table, sets)),
            Side("literal: concatenate for every pair", lambda: conditional_by_pairs(wide, sets[0], pairs), share),
            Side("concatenate once for every set and layer", lambda: conditional_by_grams(wide, sets[0]), 1 / beam),
        ],
        repetitions,
        check,
    )
    from_states, from_table, by_pairs, by_grams = timings
    why = (
        f"{1 - from_table.spread.median / from_states.spread.median:.0%} of the time from the states goes into the "
        "table, which a search forms once for all its beams."
    )
    return Answer(
        "3. Conditional CKA of a beam",
        f"beam of {beam} pairs, {layers} layers, {rows} rows, {features:,} features",
        tuple(timings),
        (
            Bar("forming the concatenations, from the states", by_pairs.times(from_states), "at least", 1000, "x", why),
            Bar("forming the concatenations, from the table", by_pairs.times(from_table), "at least", 1000, "x"),
        ),
        notes=(
            f"Concatenating for every pair does {literal_pairs} of {beam * layers**2:,} pairs, once for every set and "
            f"layer one of {beam} sets; both are extrapolated. The second is the better way to write it, and takes "
            f"{by_grams.times(from_table).median:,.0f} times as long as from the table.",
        ),
    )
