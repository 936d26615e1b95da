"""Hidden states that other tools stored: of speculators natively, of SpecForge through torch.

Tools differ in two silent ways, so both are part of every sample here: which layers the slices are, and whether the
last state was taken before or after the final norm. `check_final_state` asks the target's head.
"""

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from layerwave.errors import LayerwaveError
from layerwave.files.reading import parse_json, shown, typed
from layerwave.files.tensors import open_tensors
from layerwave.files.writing import whole_file, write_tensors
from layerwave.interop.layer_ids import layers_from_ids
from layerwave.selection.sets import check_layers
from layerwave.targets import Decoder

FinalState = Literal["pre_norm", "post_norm"]
_HEADER_KEY = "layerwave.layers"
_CHUNK = 256


@dataclass(frozen=True)
class HiddenStates:
    """States of one token sequence, as a trainer of drafts reads them.

    tokens: ids. states: outputs of `layers` (0-based), one slice a layer, ascending. final: the last layer's output,
    before or after the final norm as `final_state` says. loss_mask: tokens to be learnt, where the file has it.
    """

    tokens: Integer[np.ndarray, " T"]
    states: Float[np.ndarray, "m T D"]
    final: Float[np.ndarray, "T D"]
    layers: tuple[int, ...]
    final_state: FinalState
    loss_mask: Bool[np.ndarray, " T"] | None = None

    def __post_init__(self):
        for name, kinds in (("tokens", "iu"), ("states", "f"), ("final", "f"), ("loss_mask", "b")):
            array = getattr(self, name)
            if array is not None and array.dtype.kind not in kinds and not (kinds == "f" and _is_bfloat16(array)):
                raise LayerwaveError(f"{name} are {array.dtype}, which cannot be right: make the sample again")
        if self.states.ndim != 3 or 0 in self.states.shape:
            raise LayerwaveError(
                f"states have shape {self.states.shape}, expected (layers, tokens, width), none of them 0"
            )
        size, length, width = self.states.shape
        if size != len(self.layers) or length != len(self.tokens) or self.final.shape != (length, width):
            raise LayerwaveError(
                f"{len(self.layers)} layers and {len(self.tokens)} tokens, but states of shape {self.states.shape} and "
                f"a final state of shape {self.final.shape}: expected (layers, tokens, width) and (tokens, width)"
            )
        for name in ("states", "final"):
            if not np.isfinite(getattr(self, name)).all():
                raise LayerwaveError(f"{name} hold NaN or infinity: make the sample again")


def read_speculators(path: str | os.PathLike[str], num_layers: int, ids: Iterable[int] | None = None) -> HiddenStates:
    """Reads an `hs_{i}.safetensors`: `hidden_states` (T, m + 1, D), the last slice before the final norm, `token_ids`.

    Args:
        num_layers: of the target, N.
        ids: the boundaries that were stored, as given to launch_vllm, without N. The files do not say; only those that
            `write_speculators` wrote do, and need none.

    Raises:
        LayerwaveError: not such a file, ids missing, or ids that do not fit it.
    """
    what = "not a hidden-state file of speculators, which has hidden_states and token_ids in safetensors"
    with open_tensors(path, what, "make it again") as file:
        header = file.metadata() or {}
        stacked, tokens = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
    if stacked.ndim != 3 or tokens.ndim != 1:
        raise LayerwaveError(
            f"{path}: hidden_states has shape {stacked.shape}, token_ids {tokens.shape}: expected (T, m + 1, D), (T,)"
        )
    written = None
    if _HEADER_KEY in header:
        said = f"{path}: {_HEADER_KEY}"
        written = typed(tuple[int, ...], parse_json(header[_HEADER_KEY], said, "make it again"), said)
    if written is None and ids is None:
        raise LayerwaveError(f"{path} does not say which layers it holds: give the ids that launch_vllm was given")
    layers = check_layers(written, num_layers) if ids is None else layers_from_ids(ids, num_layers, "boundary")
    if written is not None and layers != written:
        raise LayerwaveError(
            f"{path} holds layers {shown(list(written))}, the ids given name {list(layers)}: leave ids out"
        )
    return HiddenStates(tokens, stacked[:, :-1].swapaxes(0, 1), stacked[:, -1], layers, "pre_norm")


def _is_bfloat16(array: np.ndarray) -> bool:
    return array.dtype.name == "bfloat16"


def write_speculators(sample: HiddenStates, path: str | os.PathLike[str]) -> None:
    """Writes what speculators reads, whole or not at all; the header says which layers, for `read_speculators`.

    Raises:
        LayerwaveError: the final state is post-norm, to which speculators would apply the norm again; cannot write.
    """
    if sample.final_state != "pre_norm":
        raise LayerwaveError(
            "speculators applies the final norm itself, and this final state is post_norm: take it before the norm"
        )
    stacked = np.concatenate([sample.states, sample.final[None]]).swapaxes(0, 1)
    tensors = {"hidden_states": np.ascontiguousarray(stacked), "token_ids": sample.tokens.astype(np.int64)}
    with whole_file(path) as partial:
        write_tensors(partial, tensors, {"format": "pt", _HEADER_KEY: json.dumps(sample.layers)})


def read_specforge(path: str | os.PathLike[str], num_layers: int, ids: Iterable[int]) -> HiddenStates:
    """Reads a `data_{i}.ckpt` or `.ckpt.gz`: states as float32, the final one after the final norm. Needs torch.

    Args:
        num_layers: of the target, N.
        ids: the layer outputs that were stored; the files do not say.

    Raises:
        LayerwaveError: torch is absent, not such a file, or ids that do not fit it.
    """
    try:
        import torch
    except ImportError:
        raise LayerwaveError(f"{path} is a torch file: pip install torch to read it") from None
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            raw = torch.load(file, map_location="cpu", weights_only=True)
        tokens, mask = raw["input_ids"].numpy(), raw["loss_mask"].numpy().astype(bool)
        final, joined = (raw[key].to(torch.float32).numpy() for key in ("hidden_state", "aux_hidden_state"))
    except Exception as error:  # torch lets whatever its parsers meet pass through
        raise LayerwaveError(
            f"{path}: not a hidden-state file of SpecForge, a dictionary of tensors input_ids, loss_mask, hidden_state "
            f"and aux_hidden_state ({type(error).__name__})"
        ) from None
    layers = layers_from_ids(ids, num_layers, "output")
    length, width = (*tokens.shape, *final.shape[-1:]) if tokens.ndim == final.ndim - 2 == 1 else (0, 0)
    if final.shape != (1, length, width) or joined.shape != (1, length, len(layers) * width) or mask.shape != (length,):
        raise LayerwaveError(
            f"{path}: {length} tokens and {len(layers)} ids, but hidden_state has shape {final.shape}, "
            f"aux_hidden_state {joined.shape} and loss_mask {mask.shape}: expected (1, T, D), (1, T, ids x D) and (T,)"
        )
    states = joined[0].reshape(length, len(layers), width).swapaxes(0, 1)
    return HiddenStates(tokens, states, final[0], layers, "post_norm", mask)


def check_final_state(
    sample: HiddenStates,
    decoder: Decoder,
    expected: Float[np.ndarray, "T V"] | Integer[np.ndarray, " T"],
    tolerance: float = 0.02,
) -> None:
    """Checks that the target's head makes the expected logits, or the expected best tokens, of the final state.

    Args:
        expected: the target's logits at each position, or their argmax.
        tolerance: largest difference, as a share of the largest logit; for best tokens the share that may differ. The
            default leaves room for states stored in bfloat16.

    Raises:
        LayerwaveError: they are not reproduced; the message says so if the other reading of the norm reproduces them.
    """
    errors = {state: _head_error(sample.final, state, decoder, expected) for state in ("pre_norm", "post_norm")}
    if errors[sample.final_state] <= tolerance:
        return
    other = "post_norm" if sample.final_state == "pre_norm" else "pre_norm"
    remedy = (
        f"they are reproduced when it is read as {other}: correct final_state"
        if errors[other] <= tolerance
        else "nor do they when the norm is read the other way: these states are of another layer, target or text"
    )
    what = "logits differ by a share of" if expected.ndim == 2 else "best tokens differ at a share of"
    raise LayerwaveError(
        f"the final state, read as {sample.final_state}, does not give the expected tokens: {what} "
        f"{errors[sample.final_state]:.3g}, at most {tolerance} allowed; {remedy}"
    )


def _head_error(final: np.ndarray, state: FinalState, decoder: Decoder, expected: np.ndarray) -> float:
    """Largest difference of logits over the largest logit, or the share of other best tokens."""
    worst, largest, wrong = 0.0, 0.0, 0
    for start in range(0, len(final), _CHUNK):
        part = slice(start, start + _CHUNK)
        states = jnp.asarray(final[part]).astype(decoder.dtype)
        logits = np.asarray(decoder.logits(decoder.norm(states) if state == "pre_norm" else states))
        if expected.ndim == 1:
            wrong += int((logits.argmax(-1) != expected[part]).sum())
        else:
            worst = max(worst, float(np.abs(logits - expected[part].astype(np.float32)).max()))
            largest = max(largest, float(np.abs(expected[part]).max()))
    return wrong / len(final) if expected.ndim == 1 else worst / largest
