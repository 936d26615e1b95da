"""Whether a few positions or layers outweigh the rest, as attention sinks and growing norms make them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from layerwave.calibration import Calibration
from layerwave.errors import LayerwaveError
from layerwave.selection.criteria import layer_states
from layerwave.selection.methods import SelectionSettings, select
from layerwave.selection.result import Selection

DOMINANT = 0.5
"""Share of a trace above which its holder is named: with more than half of it in one row, `p_max > 1/2`, and the
entropy says more of that row than of all others together."""


@dataclass(frozen=True)
class DominantPosition:
    """A block position that holds more than the threshold of a layer's trace."""

    layer: int
    position: int
    """Row of the block, from 0; the first token of every sample that keeps it lands in row 0."""
    share: float


@dataclass(frozen=True, eq=False)
class SinkDominance:
    """Who holds the trace of the states that were scored, and the selection with and without attention sinks."""

    positions: Float[np.ndarray, "N B"]
    """Share of each layer's trace `tr K_l` that each block position holds; rows sum to 1."""
    layers: Float[np.ndarray, " N"]
    """Share of the trace of all layers, `tr K_l / Σ tr K`, that each layer holds; sums to 1."""
    threshold: float
    keep: Selection | None
    """The selection from the pool that keeps sinks; None: see `missing`."""
    drop: Selection | None
    """The selection from the pool without sinks; None: see `missing`."""
    missing: str
    """Why `keep` or `drop` is None; empty when both are there."""

    @property
    def dominant(self) -> tuple[DominantPosition, ...]:
        """Positions above the threshold, in order of the layers."""
        found = np.argwhere(self.positions > self.threshold)
        return tuple(DominantPosition(int(l), int(b), float(self.positions[l, b])) for l, b in found)

    @property
    def dominant_layer(self) -> int | None:
        """The layer that holds more than the threshold of all traces, if there is one."""
        heaviest = int(np.argmax(self.layers))
        return heaviest if self.layers[heaviest] > self.threshold else None

    @property
    def warning(self) -> bool:
        """True when a position dominates a layer or a layer dominates the rest."""
        return bool(self.dominant) or self.dominant_layer is not None

    @property
    def reading(self) -> str:
        """One sentence."""
        worst = np.unravel_index(np.argmax(self.positions), self.positions.shape)
        share = f"block position {worst[1]} holds {self.positions[worst]:.0%} of the trace of layer {worst[0]}"
        if self.dominant:
            layers = len({found.layer for found in self.dominant})
            share += f", and {layers} of {len(self.layers)} layers are ruled by one position"
        if self.dominant_layer is not None:
            share += f"; layer {self.dominant_layer} holds {self.layers.max():.0%} of all traces"
        if self.keep is None or self.drop is None:
            beside = self.missing
        elif self.keep.layers == self.drop.layers:
            beside = f"with and without sinks the selection is {list(self.keep.layers)}"
        else:
            beside = f"the selection is {list(self.keep.layers)} with sinks and {list(self.drop.layers)} without"
        return f"{'WARNING: ' if self.warning else ''}{share[0].upper()}{share[1:]}; {beside}."


def sink_dominance(
    calibration: Calibration, settings: SelectionSettings, *, threshold: float = DOMINANT
) -> SinkDominance:
    """Shares of the trace in the calibration's chosen pool, and the selection with and without attention sinks.

    The shares are of the states as they are, whatever the weighting: `weighting="trace"` is the cure for a layer
    that dominates, `sinks="drop"` for a position. Given states (`from_states`) have one pool: `keep` is its selection.

    Raises `LayerwaveError` for a threshold outside 0 … 1, and as `select` does for the chosen pool.
    """
    if not 0 < threshold < 1:
        raise LayerwaveError(f"threshold is {threshold}: it is a share of a trace, between 0 and 1")
    energy = np.sum(layer_states(calibration) ** 2, axis=2)
    traces = energy.sum(axis=1)
    if calibration.settings is None:
        keep, drop = select(calibration, settings), None
        missing = "the states were given, so their sinks cannot be dropped: calibrate a target"
    else:
        keep, drop, missing = _with_and_without_sinks(calibration, settings)
    return SinkDominance(
        positions=energy / traces[:, None],
        layers=traces / traces.sum(),
        threshold=threshold,
        keep=keep,
        drop=drop,
        missing=missing,
    )


def _with_and_without_sinks(
    calibration: Calibration, settings: SelectionSettings
) -> tuple[Selection | None, Selection | None, str]:
    """The selections that keep and that drop sinks, and why one is missing."""
    chosen, other = calibration.settings.sinks, {"keep": "drop", "drop": "keep"}[calibration.settings.sinks]
    if settings.criterion == "acceptance":
        return None, None, f"acceptance reads single positions: its selection with sinks={other!r} needs another pass"
    selections, missing = {chosen: select(calibration, settings), other: None}, ""
    try:
        states = calibration.pool(sinks=other)
    except LayerwaveError as error:  # that pool is empty: said in the result
        missing = f"the selection with sinks={other!r} is missing: {error}"
    else:
        selections[other] = select(Calibration.from_states(states), settings)
    return selections["keep"], selections["drop"], missing
