"""Question 3: conditional CKA of a beam.

  python benchmarks/bench_conditional_cka.py [--repetitions 5] [--out benchmarks/results]

`layerwave.bench.conditional_similarity` says what is measured and beside what. Asserts equal results, no times.
"""

from harness import script

from layerwave.bench import conditional_similarity

if __name__ == "__main__":
    script(__doc__, "conditional_cka", conditional_similarity)
