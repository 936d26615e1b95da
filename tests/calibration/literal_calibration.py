"""The calibration written out literally: float64, one sample at a time, no padding, Python loops."""

import math
from fractions import Fraction

import numpy as np

POOLS = ("filtered", "keep"), ("filtered", "drop"), ("unfiltered", "keep"), ("unfiltered", "drop")


def next_token_entropy(normed, head):
    """H_t in nats at each position (paper, eq. 9)."""
    entropies = []
    for state in np.asarray(normed, np.float64):
        logits = np.asarray(head, np.float64) @ state
        p = np.exp(logits - logits.max())
        p /= p.sum()
        entropies.append(-sum(x * math.log(x) for x in p if x > 0))
    return entropies


def curve(states):
    """S_1 in nats of each layer (paper, eq. 6), from singular values."""
    values = []
    for layer in states:
        p = np.linalg.svd(layer, compute_uv=False) ** 2
        p = p / p.sum()
        values.append(-sum(x * math.log(x) for x in p if x > 0))
    return np.array(values)


def literal_calibration(samples, *, rho, block, sink_multiple):
    """Means, block counts, kept tokens and curves by pool, and sinks by sample.

    `samples` is a list of (states (N, T, D), entropies (T,)).
    """
    result = {pool: {"sum": 0.0, "blocks": 0, "kept": [], "curves": []} for pool in POOLS}
    all_sinks = []
    for states, entropies in samples:
        states = np.asarray(states, np.float64)
        T = states.shape[1]
        by_entropy = sorted(range(T), key=lambda t: (-entropies[t], t))
        filtered = sorted(by_entropy[: max(1, math.ceil(Fraction(str(rho)) * T))])
        sinks = set()
        for layer in states:
            norms = [math.sqrt(float(state @ state)) for state in layer]
            sinks |= {t for t in range(T) if norms[t] > sink_multiple * float(np.median(norms))}
        all_sinks.append(len(sinks))
        for which, policy in POOLS:
            kept = [t for t in (filtered if which == "filtered" else range(T)) if policy == "keep" or t not in sinks]
            pool = result[which, policy]
            pool["kept"].append(len(kept))
            blocks = [kept[start : start + block] for start in range(0, len(kept) - block + 1, block)]
            own = sum((states[:, tokens] for tokens in blocks), 0.0)
            pool["sum"] = pool["sum"] + own
            pool["blocks"] += len(blocks)
            pool["curves"].append(curve(own / len(blocks)) if blocks else np.full(len(states), np.nan))
    for pool in result.values():
        pool["states"] = pool["sum"] / pool["blocks"]
    return result, all_sinks


def assert_equal(calibration, fingerprints, samples, *, tolerance):
    """`calibration` is what the literal pipeline gives; `fingerprints` says which sample is which."""
    settings = calibration.settings
    literal, sinks = literal_calibration(
        samples, rho=settings.rho, block=settings.block, sink_multiple=settings.sink_multiple
    )
    order = np.argsort(fingerprints)
    np.testing.assert_array_equal(calibration.fingerprints, np.asarray(fingerprints)[order])
    np.testing.assert_array_equal(calibration.sinks, np.array(sinks)[order])
    for index, (which, policy) in enumerate(POOLS):
        pool = literal[which, policy]
        ours = calibration.pool(filtered=which == "filtered", sinks=policy)
        for layer, expected in zip(ours, pool["states"], strict=True):
            np.testing.assert_allclose(layer, expected, rtol=0, atol=tolerance * np.abs(expected).max())
        np.testing.assert_array_equal(calibration.kept[index], np.array(pool["kept"])[order])
        assert calibration.counts[index] == pool["blocks"]
        curves = calibration.sample_curves(filtered=which == "filtered", sinks=policy)
        np.testing.assert_allclose(curves, np.array(pool["curves"])[order], rtol=0, atol=10 * tolerance)
