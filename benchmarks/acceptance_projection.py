"""What projecting the token sample's states changes in predicted acceptance.

  python benchmarks/acceptance_projection.py CALIBRATION [--width W]

Projects the states of a calibration that holds them whole, as `token_megabytes` would have it, with several seeds, and
compares single layers and a few sets. By default to the share of the width that 36 layers of 2,560 features are left
with by default (826 of 2,560).
"""

import argparse
from dataclasses import replace

import numpy as np

import layerwave as lw
from layerwave.calibration.token_gather import projection_matrix, token_format

SEEDS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration")
    parser.add_argument("--width", type=int)
    options = parser.parse_args()
    whole = lw.Calibration.load(options.calibration)
    N, _, D = whole.tokens.states.shape
    width = options.width or round(D * token_format(36, 2560, lw.CalibrationSettings()).width / 2560)
    sets = [(layer,) for layer in range(N)]
    sets += [layers for name, layers in lw.baselines(N, 3).items()] + [(N - 8, N - 1), (N - 8, N - 6, N - 1)]

    exact = lw.predicted_acceptance(whole, sets)
    print(f"{D} features projected to {width}; standard error of a value {exact.standard_error.mean():.4f}")
    for seed in range(SEEDS):
        matrix = np.asarray(projection_matrix(D, width, seed))
        states = (whole.tokens.states.astype(np.float32) @ matrix).astype(whole.tokens.states.dtype)
        projected = lw.predicted_acceptance(replace(whole, tokens=replace(whole.tokens, states=states)), sets)
        change = projected.value - exact.value
        order = np.corrcoef(np.argsort(np.argsort(exact.value)), np.argsort(np.argsort(projected.value)))[0, 1]
        print(
            f"seed {seed}: change of α̂ {change.mean():+.4f} on average, {change.min():+.4f} to {change.max():+.4f}; "
            f"spread about the average {change.std():.4f}; rank correlation of {len(sets)} sets {order:.3f}; "
            f"best {exact.sets[exact.best]} becomes {projected.sets[projected.best]}"
        )


if __name__ == "__main__":
    main()
