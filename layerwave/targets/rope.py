"""Rotary position embedding: its frequencies, and how it turns queries and keys."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from layerwave.errors import LayerwaveError
from layerwave.files.reading import shown

_ORIGINAL = "original_max_position_embeddings"
# What each kind of scaling needs, and what it takes besides.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "longrope": ("short_factor", "long_factor", _ORIGINAL),
}
_OPTIONAL = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
# Keys that some files give beside rope_scaling and not in it.
_OUTSIDE = ("rope_theta", "partial_rotary_factor", _ORIGINAL)
_BELOW_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True)
class Rope:
    """Frequencies of the rotation: base `theta`, and how a checkpoint stretched them for longer contexts."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    partial: float = 1.0
    """Fraction of the channels that turns; the rest passes."""
    attention_factor: float = 1.0
    """Of cosine and sine; so queries and keys grow by it, and scores by its square."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: Sequence[float] = ()
    """One number for each pair of channels, for sequences within the original context; kept as a tuple."""
    long_factor: Sequence[float] = ()
    """The same for longer ones."""

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):  # JSON gives lists
            object.__setattr__(self, name, tuple(_number(name, factor) for factor in getattr(self, name)))
        for name in ("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"):
            _number(name, getattr(self, name))
        _number("rope_theta", self.theta, least=1.0)
        _number("factor", self.factor, least=0.0 if self.kind == "longrope" else _BELOW_ONE)
        _number("partial_rotary_factor", self.partial, most=1.0)
        if _ORIGINAL in _REQUIRED.get(self.kind, ()) or self.kind == "dynamic":
            _number(_ORIGINAL, self.original_max_positions, least=1.0, most=2.0**31)
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise LayerwaveError(
                f"RoPE's low_freq_factor is {self.low_freq_factor}, high_freq_factor {self.high_freq_factor}: the "
                "first must be the smaller; copy the model's own"
            )
        if not isinstance(self.truncate, bool):
            raise LayerwaveError(f"RoPE's truncate is {shown(self.truncate)}, expected true or false")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], names: Mapping[str, str] | None = None) -> "Rope":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

        `names`: what a family's files call a kind, where it is not the kind's own name.

        Raises:
          LayerwaveError: no base, values that contradict each other, an unknown scaling, or one with a field missing.
        """
        spellings = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
        if not all(isinstance(spelling, Mapping) for spelling in spellings):
            raise LayerwaveError("config.json: rope_scaling and rope_parameters must be objects; copy the model's own")
        named = [_named(spelling) for spelling in [{key: raw.get(key) for key in _OUTSIDE}, *spellings]]
        parameters = {key: value for spelling in named for key, value in spelling.items()}
        contradicted = {key for spelling in named for key, value in spelling.items() if parameters[key] != value}
        if contradicted:
            raise LayerwaveError(
                f"config.json gives two different values of {', '.join(sorted(contradicted))}; keep one"
            )
        theta, kind = parameters.pop("rope_theta", None), parameters.pop("rope_type", "default")
        partial = _number("partial_rotary_factor", parameters.pop("partial_rotary_factor", 1.0), most=1.0)
        if not isinstance(kind, str):
            raise LayerwaveError(
                f"config.json: rope type {shown(kind)} is not supported; supported: {', '.join(_REQUIRED)}"
            )
        kind = (names or {}).get(kind, kind)
        if theta is None:
            raise LayerwaveError(
                "config.json has no rope_theta; give the one the model was trained with (Llama 2: 10000.0), at the "
                "top level or in rope_parameters"
            )
        if kind not in _REQUIRED:
            raise LayerwaveError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(_REQUIRED)}")
        if _ORIGINAL not in _REQUIRED[kind] and not any(_ORIGINAL in spelling for spelling in named[1:]):
            parameters.pop(_ORIGINAL, None)  # Phi-3 gives it in every file
        takes = (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()))
        missing = [key for key in _REQUIRED[kind] if key not in parameters]
        extra = sorted(set(parameters) - set(takes))
        if missing or extra:
            raise LayerwaveError(
                f"config.json: rope type {kind!r} takes {list(takes)}; missing {missing}, not known {extra}"
            )
        original, positions = parameters.pop(_ORIGINAL, 0), raw.get("max_position_embeddings")
        if kind == "dynamic":
            original = positions
        if original != 0:
            original = int(_number(_ORIGINAL, original, least=1.0, most=2.0**31))
        if kind == "longrope":
            parameters.setdefault("factor", _number("max_position_embeddings", positions, most=2.0**31) / original)
        scales = {key: parameters.pop(key, None) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        scales = {key: value if value in (None, 0) else _number(key, value) for key, value in scales.items()}
        attention = _attention_factor(kind, _number("factor", parameters.get("factor", 1.0)), original, **scales)
        return cls(
            _number("rope_theta", theta, least=1.0),
            kind,
            **{key: _numbers(key, value) for key, value in parameters.items()},
            original_max_positions=original,
            partial=partial,
            attention_factor=attention,
        )

    @property
    def depends_on_length(self) -> bool:
        """Whether a longer sequence turns its first tokens differently, too."""
        return self.kind in ("dynamic", "longrope")

    def frequencies(
        self, head_dim: int, lengths: Int[Array, " b"] | None = None
    ) -> Float32[Array | np.ndarray, "#b half"]:
        """Angle per position of each pair of channels, radians; one row for all sequences, or one for each.

        Computed in float32 in the order the reference implementation uses, because an error of one unit in the last
        place is multiplied by the position.

        Args:
          lengths: tokens of each sequence. Only `depends_on_length` asks for them.
        """
        dim = int(head_dim * self.partial)
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        wavelength = np.float32(self.theta) ** exponent
        frequency = np.float32(1.0) / wavelength
        match self.kind:
            case "linear":
                frequency = frequency / np.float32(self.factor)
            case "llama3":
                frequency = self._llama3(frequency)
            case "yarn":
                frequency = self._yarn(wavelength)
            case "dynamic":
                return self._dynamic(exponent, dim, lengths)
            case "longrope":
                short, long = (
                    np.float32(1.0) / (np.asarray(factors, np.float32) * wavelength)
                    for factors in (self.short_factor, self.long_factor)
                )
                return jnp.where((lengths > self.original_max_positions)[:, None], long[None], short[None])
        return frequency[None]

    def _llama3(self, frequency: Float32[np.ndarray, " half"]) -> Float32[np.ndarray, " half"]:
        """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
        turns = self.original_max_positions * frequency / np.float32(2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0).astype(np.float32)
        return keep * frequency + (1 - keep) * frequency / np.float32(self.factor)

    def _yarn(self, wavelength: Float32[np.ndarray, " half"]) -> Float32[np.ndarray, " half"]:
        """YaRN (arXiv 2309.00071): channels that turn `beta_fast` times within the original context are kept, those
        that turn less than `beta_slow` times slowed by `factor`, with a ramp over the channels between them."""

        def channel(turns: float) -> float:
            return half * math.log(self.original_max_positions / (turns * 2 * math.pi)) / math.log(self.theta)

        half = len(wavelength)
        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        ramp = (np.arange(half, dtype=np.float32) - low) / (high - low if high > low else 0.001)
        slowed = np.clip(ramp, 0.0, 1.0).astype(np.float32)
        kept, stretched = np.float32(1.0) / wavelength, np.float32(1.0) / (np.float32(self.factor) * wavelength)
        return stretched * slowed + kept * (1 - slowed)

    def _dynamic(
        self, exponent: Float32[np.ndarray, " half"], dim: int, lengths: Int[Array, " b"]
    ) -> Float32[Array, "b half"]:
        """Dynamic NTK: beyond the original context the base grows with the sequence's length."""
        seen = jnp.maximum(lengths, self.original_max_positions).astype(jnp.float32)
        stretch = self.factor * seen / self.original_max_positions - (self.factor - 1)
        base = self.theta * stretch ** (dim / (dim - 2))
        return 1.0 / base[:, None] ** jnp.asarray(exponent)[None]


def _named(spelling: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling with the newer name of the scaling's kind; a null counts as absent."""
    return {"rope_type" if key == "type" else key: value for key, value in spelling.items() if value is not None}


def _numbers(key: str, value: Any) -> bool | float | tuple[float, ...]:
    if key == "truncate":
        return value
    if not key.endswith("_factor") or key.endswith("freq_factor"):
        return _number(key, value)
    if not isinstance(value, list | tuple):
        raise LayerwaveError(f"RoPE's {key} is {shown(value)}, expected a list of numbers; copy the model's own")
    return tuple(_number(key, x) for x in value)


def _number(name: str, value: Any, *, least: float = 0.0, most: float = 1e30) -> float:
    """The value as a float; raises `LayerwaveError` unless it is a number above `least` and up to `most`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not least < value <= most:
        raise LayerwaveError(
            f"RoPE's {name} is {shown(value)}, expected a number greater than {least:.3g} and at most {most:.3g}; copy "
            "the model's own"
        )
    return float(value)


def _attention_factor(
    kind: str,
    factor: float,
    original: int,
    attention_factor: float | None,
    mscale: float | None,
    mscale_all_dim: float | None,
) -> float:
    """Of YaRN and LongRoPE, whose papers derive it from `factor` where the file does not say it."""
    if attention_factor is not None:
        return float(attention_factor)
    if factor <= 1 or kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, scale_all = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1.0, 0.0)
    return (0.1 * scale * math.log(factor) + 1) / (0.1 * scale_all * math.log(factor) + 1)


def rotation(
    positions: Int[Array, "b T"], rope: Rope, head_dim: int, lengths: Int[Array, " b"] | None = None
) -> tuple[Float32[Array, "b T 1 half"], Float32[Array, "b T 1 half"]]:
    """Cosine and sine of every position's angles, float32; the singleton axis is for the heads."""
    frequencies = jnp.asarray(rope.frequencies(head_dim, lengths))
    angle = positions[..., None, None].astype(jnp.float32) * frequencies[:, None, None, :]
    return rope.attention_factor * jnp.cos(angle), rope.attention_factor * jnp.sin(angle)


def rotate(
    x: Float[Array, "b T heads head_dim"],
    cosine: Float32[Array, "b T 1 half"],
    sine: Float32[Array, "b T 1 half"],
) -> Float[Array, "b T heads head_dim"]:
    """Turns channel `i` with channel `i + half` by the position's angle, in float32; channels behind them pass."""
    half = cosine.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
    return turned.astype(x.dtype)
