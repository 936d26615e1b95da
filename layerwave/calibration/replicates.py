"""Replicates of a calibration: Poisson bootstrap resamples and nested parts of the samples, summed in the same pass.

A replicate counts every sample with a weight, and its sum of blocks is the weighted sum of the samples' blocks. The
weights come from the sample's fingerprint and the seed alone. So they do not depend on order, batches or processes,
they need not be stored, and the sums of two disjoint calibrations add to those of both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from jaxtyping import Float32, Float64, UInt8, UInt64

from layerwave.errors import LayerwaveError
from layerwave.kernels import centred_gram, gram

SHARES = (0.125, 0.25, 0.5)
"""Parts of the samples in a convergence curve, beside the whole."""

# Distribution function of Poisson(1) up to where float64 ends.
_POISSON = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(18)])


def sample_weights(fingerprints: UInt64[np.ndarray, " S"], replicates: int, seed: int) -> UInt8[np.ndarray, "C S"]:
    """Weights of the samples in C = 3 + R accumulators; none (C = 0) when `replicates` is 0.

    The first three are 1 where the sample belongs to the part of `SHARES`, else 0; the parts are nested. The other R
    are independent Poisson(1) draws, the number of times that a bootstrap takes the sample (Hanley and MacGibbon
    2006; Chamandy et al. 2012). Raising R keeps the first ones. From the raw words of numpy's PCG64 seeded with seed
    and fingerprint, whose stream numpy guarantees to be the same in all versions.
    """
    if replicates == 0:
        return np.zeros((0, len(fingerprints)), np.uint8)
    weights = np.empty((len(SHARES) + replicates, len(fingerprints)), np.uint8)
    for sample, fingerprint in enumerate(fingerprints):
        words = np.random.PCG64([seed, int(fingerprint)]).random_raw(1 + replicates)
        place, *uniform = (words >> np.uint64(11)) * 2.0**-53
        weights[: len(SHARES), sample] = place < np.array(SHARES)
        weights[len(SHARES) :, sample] = np.searchsorted(_POISSON, uniform, side="right")
    return weights


@dataclass(frozen=True, eq=False)
class Replicates:
    """Grams of every layer in C accumulators: three parts of the samples (`SHARES`), then R bootstrap replicates.

    They are of the pool that the settings choose, and of sums of blocks: what is scored does not know a factor that
    all layers share. Grams of sums are not sums of Grams, so only `sums` can be merged with other samples'; they have
    the size of C pools, and an artifact keeps them up to `CalibrationSettings.replicate_megabytes`.
    """

    grams: Float64[np.ndarray, "C N B B"]
    """`Z Zᵀ` of the sums of blocks Z."""
    centred: Float64[np.ndarray, "C N B B"]
    """The same of Z less its mean row, from centred features: what every CKA is made of."""
    sums: Float32[np.ndarray, "C N B D"] | None
    """Sums of blocks, or None: too large to keep."""

    def megabytes(self, features: int) -> float:
        """Size of the sums of states with so many features, kept or not."""
        C, N, B, _ = self.grams.shape
        return 4 * C * N * B * features / 1e6

    @classmethod
    def from_sums(cls, sums: Float32[np.ndarray, "C N B D"], limit: float) -> "Replicates":
        """Grams in float64, one accumulator at a time; sums of more than `limit` megabytes are not kept."""
        doubles = (accumulator.astype(np.float64) for accumulator in sums)
        grams, centred = zip(*((gram(Z), centred_gram(Z)) for Z in doubles), strict=True)
        return cls(np.stack(grams), np.stack(centred), np.ascontiguousarray(sums)).limited(limit)

    def limited(self, megabytes: float) -> "Replicates":
        """Without the sums if they are larger."""
        return self if self.sums is None or self.sums.nbytes <= megabytes * 1e6 else replace(self, sums=None)

    @classmethod
    def merge(cls, parts: Sequence["Replicates | None"], features: int, limit: float) -> "Replicates | None":
        """Replicates of all samples together, from the sums of disjoint parts; None where no part has any.

        Raises:
            LayerwaveError: some part has none, or its sums, of states with so many features, were not kept.
        """
        if all(part is None for part in parts):
            return None
        for number, part in enumerate(parts):
            if part is None or part.sums is None:
                held = "no replicates" if part is None else "the replicates' Grams without their sums"
                size = max(part.megabytes(features) for part in parts if part is not None)
                raise LayerwaveError(
                    f"calibration {number} (counted from 0) holds {held}, but Grams of parts do not add up to those "
                    f"of the whole: calibrate all parts with replicate_megabytes of at least {math.ceil(size)}, or "
                    "merge them without replicates (`layerwave merge --without-replicates`)"
                )
        return cls.from_sums(reduce(np.add, [part.sums for part in parts]), limit)
