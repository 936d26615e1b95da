"""Layer ids of every consumer: values read in the projects' own sources, and refusals."""

import pytest

from layerwave.errors import LayerwaveError
from layerwave.interop import CONSUMERS, layer_ids, layer_ids_table, layers_from_ids
from layerwave.selection import baseline

BOUNDARY = ("huggingface", "safeailab", "speculators", "vllm", "sglang-deepseek", "sglang-gpt-oss", "llamacpp")
OUTPUT = ("specforge", "sglang", "torchspec", "modelopt", "angelslim", "automodel", "sglang-jax", "dflash")


@pytest.mark.parametrize(
    ("num_layers", "boundaries", "outputs"),
    [(36, (2, 18, 33), (1, 17, 32)), (32, (2, 16, 29), (1, 15, 28))],  # Qwen3-4B, Llama-3.1-8B
)
def test_default_states_of_the_engines(num_layers, boundaries, outputs):
    layers = baseline("eagle3_engine", num_layers)
    assert layers == outputs
    for consumer in (*BOUNDARY, "tpu-inference"):
        assert layer_ids(layers, num_layers, consumer) == boundaries
    for consumer in OUTPUT:
        assert layer_ids(layers, num_layers, consumer) == outputs


@pytest.mark.parametrize(
    ("num_layers", "size", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (36, 3, (1, 17, 33)),
        (36, 1, (18,)),
    ],
)
def test_dflash_rows(num_layers, size, ids):
    """build_target_layer_ids of z-lab/dflash, which counts outputs and adds 1 into the Hugging Face tuple."""
    layers = baseline("dflash", num_layers, size)
    assert layer_ids(layers, num_layers, "dflash") == ids
    assert layer_ids(layers, num_layers, "huggingface") == tuple(k + 1 for k in ids)


def test_gpt_oss_reads_nvidias_ids():
    # nvidia/gpt-oss-120b-Eagle3-v3 asks for boundaries 24, 30, 36 of 36 layers: the last is the raw last output.
    for consumer in ("vllm", "sglang-gpt-oss", "llamacpp"):
        assert layer_ids((23, 29, 35), 36, consumer) == (24, 30, 36)


def test_every_row_names_the_same_physical_states():
    for row in layer_ids_table((4, 11, 19), 24):
        if row.ids is None:
            assert "hard-coded" in row.refusal
        else:
            offset = {"boundary": 1, "output": 0}[row.reads]
            assert row.ids == (4 + offset, 11 + offset, 19 + offset)
    assert {row.consumer for row in layer_ids_table((4, 11, 19), 24)} == set(CONSUMERS)


def test_ids_are_sorted_whatever_the_order():
    assert layer_ids([32, 1, 17], 36, "modelopt") == (1, 17, 32)


def test_last_output_is_refused_with_its_remedy():
    capable = {row.consumer for row in layer_ids_table((5, 23, 35), 36) if row.ids}
    assert capable == {"speculators", "vllm", "sglang-gpt-oss", "modelopt", "automodel", "llamacpp"}
    with pytest.raises(LayerwaveError, match=r"SGLang.*layer 35 is the last.*since sglang#32334"):
        layer_ids((5, 23, 35), 36, "sglang")
    with pytest.raises(LayerwaveError, match="after the final norm"):
        layer_ids((5, 23, 35), 36, "huggingface")


@pytest.mark.parametrize("layers", [(23, 34), (2, 46, 90, 92)])
def test_counts_other_than_three(layers):
    rows = {row.consumer: row for row in layer_ids_table(layers, 96)}
    for consumer in ("vllm", "specforge", "safeailab", "automodel", "tpu-inference"):
        assert rows[consumer].ids is None
        assert f"takes 3 layers, these are {len(layers)}" in rows[consumer].refusal
    assert rows["sglang"].ids == layers
    assert rows["speculators"].ids == tuple(layer + 1 for layer in layers)


def test_hard_coded_consumers_take_their_own_set_only():
    for consumer in ("safeailab", "tpu-inference"):
        with pytest.raises(LayerwaveError, match=r"hard-coded.*\[1, 17, 32\]"):
            layer_ids((2, 18, 33), 36, consumer)


def test_deepseek_in_sglang_cannot_say_the_first_layer():
    with pytest.raises(LayerwaveError, match="starts with 1"):
        layer_ids((0, 8, 20), 36, "sglang-deepseek")
    assert layer_ids((2, 9, 19), 36, "sglang-deepseek") == (3, 10, 20)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((1, 17, 36), "layer 36 is out of range"),
        ((-1, 3), "layer -1 is out of range"),
        ((3, 3, 5), "layer 3 is repeated"),
        ((), "empty"),
    ],
)
def test_impossible_layers(layers, message):
    with pytest.raises(LayerwaveError, match=message):
        layer_ids_table(layers, 36)


def test_unknown_consumer_lists_the_known():
    with pytest.raises(LayerwaveError, match="huggingface"):
        layer_ids((1, 2, 3), 36, "ollama")


@pytest.mark.parametrize("layers", [(0, 5, 11), (4,), (1, 2, 3, 10)])
def test_ids_lead_back_to_the_layers(layers):
    for row in layer_ids_table(layers, 12):
        if row.ids is not None:
            assert layers_from_ids(row.ids, 12, row.reads) == layers


@pytest.mark.parametrize(
    ("ids", "convention", "message"),
    [
        ((0, 5, 11), "boundary", "boundary 0 is the embedding.*convention='output'"),
        ((1, 5, 12), "output", "layer id 12 is out of range: output ids of a target of 12 layers are 0 … 11"),
        ((1, 5, 13), "boundary", "boundary ids of a target of 12 layers are 1 … 12"),
        ((32, 1, 17), "output", "out of range"),
        ((10, 1, 7), "output", "do not ascend"),
        ((1, 1, 7), "output", "repeat"),
        ((), "output", "at least one whole number"),
        ((True, 5), "output", "at least one whole number"),
    ],
)
def test_ids_that_name_no_layers(ids, convention, message):
    with pytest.raises(LayerwaveError, match=message):
        layers_from_ids(ids, 12, convention)
