"""How fast the method's steps are on this machine, beside literal ways to do them: what `layerwave bench` runs.

The scripts of the repository's `benchmarks/` ask the same functions, and add peers that layerwave does not depend on.
"""

from layerwave.bench.answer import Answer, Bar, Line
from layerwave.bench.entropy import entropy_of_triples
from layerwave.bench.growth import growth
from layerwave.bench.search import searches
from layerwave.bench.similarity import Peer, conditional_similarity, pairwise_similarity
from layerwave.bench.states import random_states
from layerwave.bench.timing import Side, Spread, Timing, take_turns

__all__ = [
    "Answer",
    "Bar",
    "Line",
    "Peer",
    "Side",
    "Spread",
    "Timing",
    "conditional_similarity",
    "entropy_of_triples",
    "growth",
    "pairwise_similarity",
    "random_states",
    "searches",
    "take_turns",
]
