"""Question 1: the entropy of every triple of layers.

  python benchmarks/bench_entropy.py [--repetitions 5] [--out benchmarks/results]

`layerwave.bench.entropy_of_triples` says what is measured and beside what. Asserts equal results, no times.
"""

from harness import script

from layerwave.bench import entropy_of_triples

if __name__ == "__main__":
    script(__doc__, "entropy", entropy_of_triples)
