"""Question 2: CKA between all layers, beside torch-cka, ckatorch, pytorch-cka and loops over pairs.

  python benchmarks/bench_cka.py [--repetitions 5] [--out benchmarks/results]

What is measured says `layerwave.bench.pairwise_similarity`; the peers are called in `peers.py`, and `requirements.txt`
names them. Asserts equal results, no times.
"""

from functools import partial

from harness import script
from peers import peers

from layerwave.bench import pairwise_similarity

if __name__ == "__main__":
    script(__doc__, "cka", partial(pairwise_similarity, peers=peers()))
