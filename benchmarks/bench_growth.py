"""Question 5: time against layers, set size, rows and beam.

  python benchmarks/bench_growth.py [--repetitions 5] [--out benchmarks/results]

`layerwave.bench.growth` says what is measured and beside what. Asserts equal results, no times.
"""

from harness import script

from layerwave.bench import growth

if __name__ == "__main__":
    script(__doc__, "growth", growth)
