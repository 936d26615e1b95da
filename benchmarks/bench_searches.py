"""Question 4: ELSI, ELSI-C, and a thousand searches at once.

  python benchmarks/bench_searches.py [--repetitions 5] [--out benchmarks/results]

`layerwave.bench.searches` says what is measured and beside what. Asserts equal results, no times.
"""

from harness import script

from layerwave.bench import searches

if __name__ == "__main__":
    script(__doc__, "searches", searches)
