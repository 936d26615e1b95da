"""The numbers that each tool wants in its config for a layer set of ours.

We number layer *outputs* from 0. The physical place between layers is the *boundary* `b = l + 1`: 0 is the embedding,
`k` the input of layer k, N the last output before the final norm. The tools write either boundaries or outputs, often
under the same JSON key, so the same ids mean different tensors to different readers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from typing import Literal, SupportsIndex

from layerwave.errors import LayerwaveError
from layerwave.selection.sets import check_layers

Convention = Literal["boundary", "output"]
"""What an id k names: the boundary k, that is the input of layer k, or the output of layer k."""


@dataclass(frozen=True)
class Consumer:
    """How one tool reads layer ids."""

    title: str
    reads: Convention
    no_last: str
    """Why the last layer's output cannot be captured, and since when or where it can; empty: it can."""
    note: str
    count: int | None = None
    """The one number of layers it takes; None: any."""
    hard_coded: bool = False
    """It reads boundaries {2, N//2, N-3} whatever its config says."""
    no_first: str = ""
    """Why the first layer's output cannot be said; empty: it can."""


# Sources: the projects' code and threads, read August to November 2026; "org/repo#n" are pull requests or issues.
CONSUMERS = {
    "huggingface": Consumer(
        "Hugging Face hidden_states",
        "boundary",
        "hidden_states[N] is taken after the final norm: hook the last layer for its raw output",
        "index into the tuple of output_hidden_states=True",
    ),
    "safeailab": Consumer(
        "SafeAILab EAGLE",
        "boundary",
        "states are captured before a layer runs",
        "the set is hard-coded in the modelling files",
        count=3,
        hard_coded=True,
    ),
    "specforge": Consumer(
        "SpecForge",
        "output",
        "it captures through SGLang, which stops before the last output (gpt-oss: since sglang#32334)",
        "versions that used N//2 for the middle layer (SpecForge#240) trained drafts one layer off",
        count=3,
    ),
    "speculators": Consumer(
        "speculators",
        "boundary",
        "",
        "give the ids to launch_vllm and to train; any count trains, but vLLM serves 3 (speculators#1065)",
    ),
    "vllm": Consumer(
        "vLLM",
        "boundary",
        "",
        "last output since vllm#36063 (DeepSeek-V2 family: vllm#46973)",
        count=3,
    ),
    "sglang": Consumer(
        "SGLang: Llama, Qwen and most",
        "output",
        "the loop stops before the last output; only gpt-oss can, since sglang#32334",
        "explicit ids get +1 in the target's class; other counts than 3 need num_aux_hidden_states",
    ),
    "sglang-deepseek": Consumer(
        "SGLang: DeepSeek family",
        "boundary",
        "the loop stops before the last output; only gpt-oss can, since sglang#32334",
        "since sglang#25454; before, ids got +1 as for Llama",
        no_first="an id list that starts with 1 is read as outputs and gets +1 (sglang#25454)",
    ),
    "sglang-gpt-oss": Consumer(
        "SGLang: gpt-oss",
        "boundary",
        "",
        "since sglang#32334; before, ids got +1 and the last output was missing",
    ),
    "torchspec": Consumer(
        "TorchSpec",
        "output",
        "it appends boundary N itself for the targets (since TorchSpec#89), so the id would stand there twice",
        "its vLLM backend adds 1",
    ),
    "modelopt": Consumer(
        "NVIDIA ModelOpt",
        "output",
        "",
        "hooks on layer outputs; list(set(ids)) in its code can reorder, ours are sorted",
    ),
    "angelslim": Consumer(
        "AngelSlim",
        "output",
        "the Hugging Face tuple it reads with offset 1 ends after the final norm",
        "its key is aux_hidden_states_layer_ids; its PyTorch evaluation ignores the ids",
    ),
    "automodel": Consumer(
        "NeMo Automodel",
        "output",
        "",
        "hooks on layer outputs; shallow targets raise since Automodel#2256",
        count=3,
    ),
    "sglang-jax": Consumer(
        "sglang-jax",
        "output",
        "states are captured before a layer runs, no version read captures the last output",
        "explicit ids always get +1",
    ),
    "tpu-inference": Consumer(
        "tpu-inference",
        "boundary",
        "states are captured before a layer runs, no version read captures the last output",
        "ids of the config are ignored for EAGLE-3",
        count=3,
        hard_coded=True,
    ),
    "llamacpp": Consumer(
        "llama.cpp",
        "boundary",
        "",
        "last output and explicit ids since llama.cpp#25794; only top-level ids are read (llama.cpp#27040)",
    ),
    "dflash": Consumer(
        "DFlash",
        "output",
        "the Hugging Face tuple it reads with offset 1 ends after the final norm",
        "target_layer_ids of its config",
    ),
}


@dataclass(frozen=True)
class LayerIds:
    """One row of the table: the ids for one consumer, or why there are none."""

    consumer: str
    title: str
    reads: Convention
    ids: tuple[int, ...] | None
    refusal: str
    note: str


def layer_ids(layers: Iterable[SupportsIndex], num_layers: int, consumer: str) -> tuple[int, ...]:
    """The ids, ascending, that make `consumer` capture the outputs of these layers.

    Args:
        layers: 0-based layer outputs, as in `Selection.layers`.
        num_layers: number of the target's layers, N.
        consumer: a key of `CONSUMERS`; SGLang has one for each way in which its target classes read ids.

    Raises:
        LayerwaveError: for layers out of range or repeated, an unknown consumer, and a set that the consumer cannot
            capture or count; the message says since which version it can, where one is known.
    """
    layers = check_layers(layers, num_layers)
    row = _row(layers, num_layers, consumer)
    if row.ids is None:
        raise LayerwaveError(f"{row.title} cannot read layers {list(layers)} of {num_layers}: {row.refusal}")
    return row.ids


def layer_ids_table(layers: Iterable[SupportsIndex], num_layers: int) -> tuple[LayerIds, ...]:
    """The ids for every consumer, or its reason for refusing. Raises `LayerwaveError` for impossible layers."""
    layers = check_layers(layers, num_layers)
    return tuple(_row(layers, num_layers, consumer) for consumer in CONSUMERS)


def layers_from_ids(ids: Iterable[SupportsIndex], num_layers: int, convention: Convention) -> tuple[int, ...]:
    """The layers, 0-based outputs, whose states a reader of this convention captures: the inverse of `layer_ids`.

    Raises:
        LayerwaveError: the embedding (boundary 0), which is no layer's output; ids that are not whole numbers, repeated
            or out of range; and ids that do not ascend, because engines hand states over in forward order whatever the
            list says, while trainers may have joined them in the list's order.
    """
    if convention not in ("boundary", "output"):
        raise LayerwaveError(f"convention {convention!r} is not known: give boundary or output")
    given = list(ids)
    first = 1 if convention == "boundary" else 0
    if not given or not all(isinstance(k, Integral) and not isinstance(k, bool) for k in given):
        raise LayerwaveError(f"layer ids {given}: expected a list of at least one whole number")
    if first and 0 in given:
        raise LayerwaveError(
            f"layer ids {given} count boundaries, and boundary 0 is the embedding: only outputs of layers are read; if "
            "they count outputs, pass convention='output'"
        )
    outside = [k for k in given if not first <= k < num_layers + first]
    if outside:
        raise LayerwaveError(
            f"layer id {outside[0]} is out of range: {convention} ids of a target of {num_layers} layers are {first} … "
            f"{num_layers - 1 + first}; another target, or another convention"
        )
    if any(a >= b for a, b in pairwise(given)):
        raise LayerwaveError(
            f"layer ids {given} repeat or do not ascend, so which slice of fc reads which layer is not known: sort "
            "them in config.json if the draft was trained on states in forward order"
        )
    return tuple(int(k) - first for k in given)


def _row(layers: tuple[int, ...], num_layers: int, consumer: str) -> LayerIds:
    if consumer not in CONSUMERS:
        raise LayerwaveError(f"unknown consumer {consumer!r}: choose from {', '.join(CONSUMERS)}")
    reader = CONSUMERS[consumer]
    refusal = _refusal(reader, layers, num_layers)
    offset = 1 if reader.reads == "boundary" else 0
    ids = None if refusal else tuple(layer + offset for layer in layers)
    return LayerIds(consumer, reader.title, reader.reads, ids, refusal, reader.note)


def _refusal(reader: Consumer, layers: tuple[int, ...], num_layers: int) -> str:
    """Why the consumer cannot read this set; empty when it can."""
    if reader.count not in (None, len(layers)):
        return f"it takes {reader.count} layers, these are {len(layers)}"
    hard_coded = (1, num_layers // 2 - 1, num_layers - 4)
    if reader.hard_coded and layers != hard_coded:
        return f"its set is hard-coded and ids are ignored: only layers {list(hard_coded)} (the rule eagle3_engine)"
    if num_layers - 1 in layers and reader.no_last:
        return f"layer {num_layers - 1} is the last: {reader.no_last}"
    if 0 in layers and reader.no_first:
        return f"layer 0 is the first: {reader.no_first}"
    return ""
