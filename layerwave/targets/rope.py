"""Rotary position embedding: its frequencies, and how it turns queries and keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from layerwave.errors import LayerwaveError

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class Rope:
    """Frequencies of the rotation: base `theta`, and how a checkpoint stretched them for longer contexts."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Rope":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

        Raises:
          LayerwaveError: no base, values that contradict each other, an unknown scaling, or one with a field missing.
        """
        spellings = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
        if not all(isinstance(spelling, Mapping) for spelling in spellings):
            raise LayerwaveError("config.json: rope_scaling and rope_parameters must be objects; copy the model's own")
        named = [_named(spelling) for spelling in spellings]
        parameters = {key: value for spelling in named for key, value in spelling.items()}
        contradicted = [key for spelling in named for key, value in spelling.items() if parameters[key] != value]
        base = raw.get("rope_theta")
        if contradicted or parameters.setdefault("rope_theta", base) != (base or parameters["rope_theta"]):
            contradicted = contradicted or ["rope_theta"]
            raise LayerwaveError(f"config.json gives two different values of {', '.join(contradicted)}; keep one")
        theta, kind = parameters.pop("rope_theta"), parameters.pop("rope_type", "default")
        if theta is None:
            raise LayerwaveError(
                "config.json has no rope_theta; give the one the model was trained with (Llama 2: 10000.0), at the "
                "top level or in rope_parameters"
            )
        if kind not in _REQUIRED:
            raise LayerwaveError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_REQUIRED)}")
        missing = [key for key in _REQUIRED[kind] if key not in parameters]
        extra = sorted(set(parameters) - set(_REQUIRED[kind]))
        if missing or extra:
            raise LayerwaveError(
                f"config.json: rope type {kind!r} takes {list(_REQUIRED[kind])}; missing {missing}, not known {extra}"
            )
        original = int(parameters.pop("original_max_position_embeddings", 0))
        factors = {key: float(value) for key, value in parameters.items()}
        return cls(float(theta), kind, **factors, original_max_positions=original)

    def frequencies(self, head_dim: int) -> Float32[np.ndarray, " half"]:
        """Angle per position of each pair of channels, radians; `head_dim // 2` of them.

        Computed in float32 in the order the reference implementation uses, because an error of one unit in the last
        place is multiplied by the position.
        """
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequency = np.float32(1.0) / (np.float32(self.theta) ** exponent)
        if self.kind == "linear":
            return frequency / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(frequency)
        return frequency

    def _llama3(self, frequency: Float32[np.ndarray, " half"]) -> Float32[np.ndarray, " half"]:
        """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
        turns = self.original_max_positions * frequency / np.float32(2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0).astype(np.float32)
        return keep * frequency + (1 - keep) * frequency / np.float32(self.factor)


def _named(spelling: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling with the newer name of the scaling's kind."""
    return {"rope_type" if key == "type" else key: value for key, value in spelling.items()}


def rotation(
    positions: Int[Array, "b T"], frequencies: Float32[np.ndarray, " half"]
) -> tuple[Float32[Array, "b T 1 half"], Float32[Array, "b T 1 half"]]:
    """Cosine and sine of every position's angles, float32; the singleton axis is for the heads."""
    angle = positions[..., None, None].astype(jnp.float32) * jnp.asarray(frequencies)[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "b T heads head_dim"],
    cosine: Float32[Array, "b T 1 half"],
    sine: Float32[Array, "b T 1 half"],
) -> Float[Array, "b T heads head_dim"]:
    """Turns channel `i` with channel `i + half` by the position's angle, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
