"""What a calibration leaves: block sums of every layer in four pools, and how such sums are merged."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int64, UInt8, UInt64

from layerwave.calibration.replicates import Replicates, sample_weights
from layerwave.calibration.settings import POOLS, CalibrationSettings
from layerwave.calibration.storage import ARRAYS, REPLICATE_ARRAYS, TOKEN_ARRAYS, read, write
from layerwave.calibration.token_sample import TokenSample
from layerwave.errors import LayerwaveError


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What one pass over the conversations left: sums of blocks, counts and per-sample curves.

    Letters: P pools in the order of `POOLS`, N layers, B tokens of a block, D features, S samples. Samples
    stand in ascending order of their fingerprints, so that the artifact does not depend on the order of the
    file. States that a user brought (`from_states`) have one pool, no samples and no settings.
    """

    sums: Float32[np.ndarray, "P N B D"]
    """Sum over blocks of the hidden states (paper, eq. 11, before the division)."""
    counts: Int64[np.ndarray, " P"]
    """Blocks in each sum."""
    curves: Float32[np.ndarray, "P S N"]
    """S_1 in nats of each sample's own block mean; NaN where the sample gave no block (see `kept`)."""
    kept: Int64[np.ndarray, "P S"]
    """Tokens of each sample that the pool kept; `kept // B` of them made blocks, `kept % B` were dropped."""
    lengths: Int64[np.ndarray, " S"]
    """Tokens of each sample."""
    sinks: Int64[np.ndarray, " S"]
    """Attention sinks among them."""
    fingerprints: UInt64[np.ndarray, " S"]
    """First eight bytes of the SHA-256 of each sample's token ids (see `tokens.fingerprint`)."""
    settings: CalibrationSettings | None
    target_name: str
    target_fingerprint: str
    target_dtype: str
    tallies: dict[str, int]
    """Rows read, rows dropped by reason, samples cut to `max_length`, compilations: see `calibrate`."""
    replicates: Replicates | None = None
    """Bootstrap replicates and parts of the samples of the chosen pool; None when switched off."""
    tokens: TokenSample | None = None
    """States of all layers at single drawn positions, for predicted acceptance; None when switched off."""
    checks: dict[str, float] = field(default_factory=dict)
    """Greatest deviations that the pass found when it checked itself, see self_checks.py."""
    warnings: tuple[str, ...] = ()
    """What the pass warned of."""

    @property
    def num_layers(self) -> int:
        """N."""
        return self.sums.shape[1]

    @property
    def states(self) -> Float32[np.ndarray, "N B D"]:
        """Mean over blocks Z_0 ... Z_{N-1} of the pool that the settings choose (paper, eq. 11)."""
        return self.pool()

    def pool(
        self, *, filtered: bool = True, sinks: Literal["keep", "drop"] | None = None
    ) -> Float32[np.ndarray, "N B D"]:
        """Mean over blocks of one pool; by default the filtered one, with sinks as the settings say.

        Raises:
            LayerwaveError: no block fell into the pool, or the states were given by a user: one pool only.
        """
        index = self._index(filtered, sinks)
        if self.counts[index] == 0:
            raise LayerwaveError(
                f"the pool {'/'.join(POOLS[index])} holds no block of {self.sums.shape[2]} tokens: "
                "calibrate with longer conversations, a smaller block or a larger rho"
            )
        return self.sums[index] / np.float32(self.counts[index])

    def blocks(self, *, filtered: bool = True, sinks: Literal["keep", "drop"] | None = None) -> int:
        """Blocks that fell into one pool; without any, `pool` refuses."""
        return int(self.counts[self._index(filtered, sinks)])

    def sample_curves(
        self, *, filtered: bool = True, sinks: Literal["keep", "drop"] | None = None
    ) -> Float32[np.ndarray, "S N"]:
        """S_1 in nats over depth for each sample of one pool (Figs. 1 and 4); NaN rows gave no block."""
        return self.curves[self._index(filtered, sinks)]

    def _index(self, filtered: bool, sinks: str | None) -> int:
        if self.settings is None:
            if not filtered or sinks is not None:
                raise LayerwaveError(
                    "states given with from_states are one pool, but another was asked for: "
                    "calibrate a target to get all four pools"
                )
            return 0
        wanted = ("filtered" if filtered else "unfiltered", sinks or self.settings.sinks)
        if wanted not in POOLS:
            raise LayerwaveError(f"sinks is {sinks!r}, but must be keep or drop: pass one of them")
        return POOLS.index(wanted)

    @property
    def sample_weights(self) -> UInt8[np.ndarray, "C S"]:
        """Weight of each sample in each accumulator of `replicates`; none without replicates."""
        number = self.settings.replicates if self.replicates else 0
        return sample_weights(self.fingerprints, number, self.settings.seed if number else 0)

    @property
    def sample_blocks(self) -> Int64[np.ndarray, " S"]:
        """Blocks that each sample gave to the chosen pool."""
        return self.kept[self._index(True, None)] // self.sums.shape[2]

    def without_replicates(self) -> "Calibration":
        """The same calibration as if `replicates` had been 0: what merges when the replicates' sums are not kept."""
        return replace(self, settings=self.settings and replace(self.settings, replicates=0), replicates=None)

    @property
    def summary(self) -> dict[str, int]:
        """The tallies, and what the chosen pool made of them: numbers of rows, tokens and blocks."""
        pool, block = self._index(True, None), self.sums.shape[2]
        return (
            dict(self.tallies)
            | {
                "samples": len(self.lengths),
                "samples without a block": int((self.kept[pool] < block).sum()),
                "tokens": int(self.lengths.sum()),
                "attention sinks": int(self.sinks.sum()),
                "kept tokens": int(self.kept[pool].sum()),
                "kept tokens in partial blocks, dropped": int((self.kept[pool] % block).sum()),
                "blocks": int(self.counts[pool]),
            }
            | self._replicate_summary
            | (self.tokens.summary(self.settings) if self.tokens else {})
        )

    @property
    def _replicate_summary(self) -> dict[str, int]:
        if self.replicates is None:
            return {}
        kept = "kept" if self.replicates.sums is not None else "not kept, so that only Grams are left"
        return {
            "bootstrap replicates": self.settings.replicates,
            f"megabytes of replicates' sums, {kept}": round(self.replicates.megabytes(self.sums.shape[-1])),
        }

    @property
    def data_fingerprint(self) -> str:
        """Equal for the same set of samples in any order."""
        return data_fingerprint(self.fingerprints)

    @cached_property
    def fingerprint(self) -> str:
        """Names `states` and the token sample as it is used: the first 16 hexadecimal digits of their SHA-256.

        A selection records it.
        """
        read = [self.states]
        if self.tokens is not None:
            read += [*vars(self.tokens).values(), self.tokens.used(self.settings.sinks)]
        digest = hashlib.sha256()
        for array in read:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        pools, layers, block, features = self.sums.shape
        origin = f"{len(self.lengths)} samples, rho={self.settings.rho:g}" if self.settings else "given"
        return (
            f"Calibration({self.target_name}: {layers} layers x {features} features, block {block}, "
            f"{pools} pool{'s' if pools > 1 else ''}, {origin})"
        )

    def _repr_html_(self) -> str:
        """For notebooks: what `repr` says, and the tallies as a table."""
        rows = "".join(f"<tr><td>{escape(what)}</td><td>{count:,}</td></tr>" for what, count in self.summary.items())
        return f"<table><caption>{escape(repr(self))}</caption>{rows}</table>"

    @classmethod
    def from_states(cls, states: Any, *, name: str = "given states") -> "Calibration":
        """Take states that a user brings: an array (N, B, D), one matrix of B tokens for each of N layers.

        Raises:
            LayerwaveError: not three axes, empty, or a layer (named) that is all zero or not finite.
        """
        try:
            sums = np.array(states)
        except ValueError as error:
            raise LayerwaveError(f"states are no array ({error}): stack layers of equal shape") from None
        if sums.dtype.kind not in "fiu" and sums.dtype.name != "bfloat16":
            raise LayerwaveError(f"states are of type {sums.dtype}, but must be real numbers: convert them")
        sums = sums.astype(np.float32)
        if sums.ndim != 3 or 0 in sums.shape:
            raise LayerwaveError(
                f"states have shape {sums.shape}, but must be (layers, block, features): "
                "stack one matrix of tokens x features for each layer"
            )
        check_layers(np.abs(sums).max(axis=(1, 2)))
        return cls(
            sums=sums[None],
            counts=np.ones(1, np.int64),
            curves=np.zeros((1, 0, len(sums)), np.float32),
            kept=np.zeros((1, 0), np.int64),
            lengths=np.zeros(0, np.int64),
            sinks=np.zeros(0, np.int64),
            fingerprints=np.zeros(0, np.uint64),
            settings=None,
            target_name=name,
            target_fingerprint=hashlib.sha256(sums.tobytes()).hexdigest(),
            target_dtype="float32",
            tallies={},
        )

    @classmethod
    def merge(cls, parts: Sequence["Calibration"]) -> "Calibration":
        """Join calibrations of disjoint samples; equal to one calibration of all of them, to rounding.

        Raises:
            LayerwaveError: nothing to merge, parts that differ in target or settings (the field is named),
                states given by a user, a conversation that stands in two parts, replicates whose sums were too
                large to keep, or some parts with and some without replicates or a token sample.
        """
        if not parts:
            raise LayerwaveError("no calibration to merge: pass at least one")
        if len(parts) == 1:
            return parts[0]
        first = _identity(parts[0])
        for part in parts[1:]:
            for name, value in _identity(part).items():
                if value != first[name]:
                    raise LayerwaveError(
                        f"calibrations differ in {name} ({first[name]} and {value}), but must agree to be "
                        f"merged: calibrate all parts with one {name}"
                    )
        fingerprints = np.concatenate([part.fingerprints for part in parts])
        unique, order = np.unique(fingerprints, return_index=True)
        if len(unique) < len(fingerprints):
            raise LayerwaveError(
                f"{len(fingerprints) - len(unique)} of {len(fingerprints)} samples stand in two of the "
                "calibrations, but each may count only once: calibrate disjoint parts of the conversations"
            )
        replicates = Replicates.merge(
            [part.replicates for part in parts], parts[0].sums.shape[-1], parts[0].settings.replicate_megabytes
        )
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts], axis=axis).take(order, axis=axis)
            for name, axis in (("curves", 1), ("kept", 1), ("lengths", 0), ("sinks", 0), ("fingerprints", 0))
        }
        return cls(
            sums=np.sum([part.sums for part in parts], axis=0, dtype=np.float32),
            counts=np.sum([part.counts for part in parts], axis=0),
            **joined,
            settings=parts[0].settings,
            target_name=parts[0].target_name,
            target_fingerprint=parts[0].target_fingerprint,
            target_dtype=parts[0].target_dtype,
            tallies={key: sum(part.tallies.get(key, 0) for part in parts) for key in parts[0].tallies},
            checks={
                name: max(part.checks.get(name, 0.0) for part in parts)
                for name in dict.fromkeys(name for part in parts for name in part.checks)
            },
            warnings=tuple(dict.fromkeys(warning for part in parts for warning in part.warnings)),
            replicates=replicates,
            tokens=_merged_tokens(parts),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one `.safetensors` file, whole or not at all; its header holds all that is not an array.

        Raises:
            LayerwaveError: the folder is missing or cannot be written.
        """
        write(
            path,
            settings=self.settings,
            header={
                "target_name": self.target_name,
                "target_fingerprint": self.target_fingerprint,
                "target_dtype": self.target_dtype,
                "num_layers": str(self.num_layers),
                "data_fingerprint": self.data_fingerprint,
                "tallies": json.dumps(self.tallies),
                "checks": json.dumps(self.checks),
                "warnings": json.dumps(self.warnings),
            },
            arrays={name: getattr(self, name) for name in ARRAYS}
            | {name: getattr(self.replicates, name.removeprefix("replicate_"), None) for name in REPLICATE_ARRAYS}
            | {name: getattr(self.tokens, name.removeprefix("token_"), None) for name in TOKEN_ARRAYS},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read what `save` wrote.

        Raises:
            LayerwaveError: no such file, not a safetensors file, not a calibration, another format version,
                or arrays that are missing or do not fit together.
        """
        settings, header, arrays = read(path)
        if settings and header["data_fingerprint"] != data_fingerprint(arrays["fingerprints"]):
            raise LayerwaveError(f"{path} is damaged (data_fingerprint is not that of its samples): calibrate again")
        grams, centred, sums = (arrays.get(name) for name in REPLICATE_ARRAYS)
        tokens = {name.removeprefix("token_"): arrays[name] for name in TOKEN_ARRAYS if name in arrays}
        return cls(
            **{name: arrays[name] for name in ARRAYS},
            settings=settings,
            target_name=header["target_name"],
            target_fingerprint=header["target_fingerprint"],
            target_dtype=header["target_dtype"],
            tallies=json.loads(header["tallies"]),
            checks=json.loads(header["checks"]),
            warnings=tuple(json.loads(header["warnings"])),
            replicates=None if grams is None else Replicates(grams, centred, sums),
            tokens=TokenSample(**tokens) if tokens else None,
        )


def data_fingerprint(fingerprints: UInt64[np.ndarray, " S"]) -> str:
    """SHA-256 over the samples' fingerprints, in ascending order."""
    return hashlib.sha256(np.sort(fingerprints).astype("<u8").tobytes()).hexdigest()


def check_layers(largest: Float32[np.ndarray, " N"]) -> None:
    """Refuse a layer whose greatest magnitude (`largest`, one a layer) is zero or not finite, by name."""
    for layer in np.flatnonzero(~np.isfinite(largest)):
        raise LayerwaveError(
            f"the states of layer {layer} hold NaN or infinity, but must be finite: "
            "check the checkpoint, or load the target with dtype float32"
        )
    for layer in np.flatnonzero(largest == 0):
        raise LayerwaveError(
            f"the states of layer {layer} are all zero, but must not be: check the checkpoint or the array"
        )


def _identity(part: Calibration) -> dict[str, object]:
    """What has to agree before two calibrations may be added."""
    if part.settings is None:
        raise LayerwaveError("states given with from_states cannot be merged: average them before")
    return {
        "target fingerprint": part.target_fingerprint,
        "target dtype": part.target_dtype,
        "shape of the states": part.sums.shape[1:],
        **{name: value for name, value in asdict(part.settings).items() if name != "replicate_megabytes"},
    }


def _merged_tokens(parts: Sequence[Calibration]) -> TokenSample | None:
    """Token sample of all positions; None where no part has any."""
    samples = [part.tokens for part in parts]
    if all(sample is None for sample in samples):
        return None
    if None in samples:
        raise LayerwaveError(
            f"calibration {samples.index(None)} (counted from 0) holds no token sample, but others do: calibrate all "
            "parts with token_sample=True, or all with token_sample=False (--no-token-sample)"
        )
    return TokenSample.merge(samples, parts[0].settings)
