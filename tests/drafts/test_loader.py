"""Rows are whole examples, each where its mask and positions say; the order is a function of seed and step."""

import jax.numpy as jnp
import numpy as np
import pytest

from layerwave.calibration.tokens import fingerprints
from layerwave.drafts.examples import Example, Examples
from layerwave.drafts.loader import PADDING, Rows, attention_mask, split
from layerwave.errors import LayerwaveError


def make_examples(lengths, seed=0) -> Examples:
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 50, length).astype(np.int32) for length in lengths]
    numbers = fingerprints(tokens)
    rows = tuple(
        Example(t, rng.random(len(t)) < 0.5, f"line {i}", number)
        for i, (t, number) in enumerate(zip(tokens, numbers, strict=True))
    )
    return Examples(rows, {}, 50)


LENGTHS = [70, 5, 64, 33, 128, 12, 12, 90, 1, 40]


@pytest.mark.parametrize("packed", [True, False])
def test_every_example_stands_whole_in_one_row(packed):
    examples = make_examples(LENGTHS)
    rows = Rows.lay(examples, 128, packed=packed)
    assert sorted(i for row in rows.plan for i in row) == list(range(len(LENGTHS)))
    assert len(rows.plan) == len(LENGTHS) if not packed else sum(LENGTHS) / 128 <= len(rows.plan) <= 5
    batch = rows.batch(range(len(rows.plan)))
    assert batch.tokens.shape == (len(rows.plan), 128)
    for i, example in enumerate(examples):
        (row,) = {int(r) for r in np.nonzero(batch.documents == i)[0]}
        place = np.nonzero(batch.documents[row] == i)[0]
        np.testing.assert_array_equal(np.diff(place), 1)
        np.testing.assert_array_equal(batch.tokens[row, place], example.tokens)
        np.testing.assert_array_equal(batch.loss_mask[row, place], example.loss_mask)
        np.testing.assert_array_equal(batch.positions[row, place], np.arange(len(example.tokens)))
    assert not batch.loss_mask[batch.documents == PADDING].any()
    assert (batch.documents != PADDING).sum() == sum(LENGTHS)


def test_rows_are_no_longer_than_needed():
    assert Rows.lay(make_examples([70, 5]), 2048, packed=False).length == 128
    assert Rows.lay(make_examples([70, 5]), 2048, packed=True).plan == ((0, 1),)
    assert Rows.lay(make_examples([70, 5]), 100, packed=False).length == 100


def test_an_example_longer_than_a_row_is_named():
    with pytest.raises(LayerwaveError, match="line 1: 65 tokens, but max_length is 64"):
        Rows.lay(make_examples([3, 65]), 64, packed=True)


def test_order_from_a_step_is_the_tail_of_the_whole_order():
    rows = Rows.lay(make_examples(LENGTHS), 128, packed=False)
    order = rows.shuffled(4, 12, seed=7)
    whole = [chosen.tolist() for chosen in order]
    assert len(whole) == 12
    assert [chosen.tolist() for chosen in order[5:]] == whole[5:]
    flat = np.concatenate(whole)
    for epoch in range(4):  # each epoch shows every row once, in another order
        assert sorted(flat[10 * epoch : 10 * epoch + 10]) == list(range(10))[: len(flat) - 10 * epoch]
    assert flat[:10].tolist() != flat[10:20].tolist()
    assert whole != [chosen.tolist() for chosen in rows.shuffled(4, 12, seed=8)]
    assert sorted(row for (row,) in rows.shuffled(1, 10, seed=7)) == list(range(10))


def test_a_batch_of_more_rows_than_there_are_is_refused():
    with pytest.raises(LayerwaveError, match="batch_size is 11, but the data make 10 rows of 128 tokens"):
        Rows.lay(make_examples(LENGTHS), 128, packed=False).shuffled(11, 1, seed=0)


def test_one_pass_in_order_fills_the_last_batch_with_empty_rows():
    rows = Rows.lay(make_examples(LENGTHS), 128, packed=False)
    passes = list(rows.in_order(4))
    assert np.concatenate(passes).tolist() == [*range(10), PADDING, PADDING]
    last = rows.batch(passes[-1])
    assert (last.documents[2:] == PADDING).all()
    assert not last.loss_mask[2:].any()


def test_attention_stays_in_the_document():
    documents = np.array([[0, 0, 3, 3, PADDING]], np.int32)
    expected = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(np.asarray(attention_mask(jnp.asarray(documents)))[0], expected)


def test_split_moves_nothing_when_data_are_added_or_reordered():
    examples = make_examples(range(1, 200))
    train, test = split(examples, 0.2)
    assert len(train) + len(test) == 199
    assert 20 <= len(test) <= 60  # 40 expected, standard deviation 5.7
    shuffled = Examples(examples.rows[::-1][:150], {}, 50)
    held = {int(row.fingerprint) for row in test}
    assert {int(row.fingerprint) for row in split(shuffled, 0.2)[1]} == held & {int(r.fingerprint) for r in shuffled}
    assert len(split(examples, 0.0)[1]) == 0
    with pytest.raises(LayerwaveError, match="leaves 0 of 3 examples"):
        split(make_examples([5, 6, 7]), 1e-9)
