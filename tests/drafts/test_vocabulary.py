"""The draft vocabulary: which tokens it takes, its tables, and what it refuses."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwave.drafts import DraftVocabulary
from layerwave.errors import LayerwaveError


def test_most_frequent_tokens_ties_to_the_lower_id():
    counts = np.array([0, 5, 2, 9, 2, 0, 2])
    vocabulary = DraftVocabulary.from_counts(counts, 4)
    assert vocabulary.tokens.tolist() == [1, 2, 3, 4]
    assert vocabulary.d2t.tolist() == [1, 1, 1, 1]
    assert vocabulary.t2d.tolist() == [False, True, True, True, True, False, False]
    assert vocabulary.d2t.dtype == np.int64
    assert vocabulary.t2d.dtype == bool


def test_the_lowest_unused_ids_fill_up():
    counts = np.zeros(10, np.int64)
    counts[[7, 9]] = 3
    assert DraftVocabulary.from_counts(counts, 5).tokens.tolist() == [0, 1, 2, 7, 9]


def test_unsigned_counts_are_not_turned_around():
    assert DraftVocabulary.from_counts(np.array([1, 0, 2], np.uint32), 1).tokens.tolist() == [2]


def test_all_tokens_are_the_identity():
    vocabulary = DraftVocabulary.from_counts(np.ones(6, np.int64), 6)
    assert vocabulary.tokens.tolist() == [*range(6)]
    assert not vocabulary.d2t.any()
    assert vocabulary.t2d.all()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40).filter(any), st.data())
def test_tables_and_back(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = DraftVocabulary.from_counts(np.array(counts), size)
    # By hand: sort by falling count, then by id.
    expected = sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])
    assert vocabulary.tokens.tolist() == expected
    assert [i + offset for i, offset in enumerate(vocabulary.d2t)] == expected == np.nonzero(vocabulary.t2d)[0].tolist()
    for t2d in (vocabulary.t2d, None):
        again = DraftVocabulary.from_d2t(vocabulary.d2t, t2d, len(counts))
        assert again.fingerprint == vocabulary.fingerprint
        assert again.tokens.tolist() == expected


def test_fingerprint_tells_ids_and_target_apart():
    one, other, wider = (DraftVocabulary(np.array(ids), size) for ids, size in (([1, 3], 5), ([1, 4], 5), ([1, 3], 6)))
    assert len({one.fingerprint, other.fingerprint, wider.fingerprint}) == 3
    assert one.fingerprint == hashlib.sha256(struct.pack("<qqq", 5, 1, 3)).hexdigest()


def test_restrict_takes_the_rows_of_the_head():
    head = np.arange(12.0).reshape(6, 2)
    vocabulary = DraftVocabulary(np.array([1, 4]), 6)
    np.testing.assert_array_equal(vocabulary.restrict(head), [[2.0, 3.0], [8.0, 9.0]])
    with pytest.raises(LayerwaveError, match="a head over 5 tokens for a draft vocabulary over 6"):
        vocabulary.restrict(head[:5])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftVocabulary.from_counts(np.ones(4, np.int64), 5), "is 5, but the target has 4 tokens"),
        (lambda: DraftVocabulary.from_counts(np.ones(4, np.int64), 0), "must be at least 1"),
        (lambda: DraftVocabulary.from_counts(np.zeros(4, np.int64), 2), "must count something"),
        (lambda: DraftVocabulary.from_counts(np.array([3, -1]), 1), "must count something"),
        (lambda: DraftVocabulary(np.array([2, 1]), 4), "must ascend strictly"),
        (lambda: DraftVocabulary(np.array([1, 1]), 4), "must ascend strictly"),
        (lambda: DraftVocabulary(np.array([1, 4]), 4), "target ids 1 … 4, but the target has 0 … 3"),
        (lambda: DraftVocabulary(np.array([-1, 2]), 4), "target ids -1 … 2"),
        (lambda: DraftVocabulary(np.array([], np.int64), 4), r"shape \(0,\)"),
        (lambda: DraftVocabulary.from_d2t(np.array([0, -1]), None, 4), "does not hold offsets.*must ascend"),
        (lambda: DraftVocabulary.from_d2t(np.array([3, 9]), None, 4), "does not hold offsets.*target ids 3 … 10"),
        (lambda: DraftVocabulary.from_d2t(np.zeros(2, np.int64), np.ones(4, bool), 4), "t2d marks 4 of 4 tokens"),
        (lambda: DraftVocabulary.from_d2t(np.array([0, 1]), np.array([1, 1, 0, 0], bool), 4), "do not agree"),
        (lambda: DraftVocabulary.from_d2t(np.array([0, 1]), np.array([1, 0, 1], bool), 4), "t2d marks 2 of 3 tokens"),
    ],
)
def test_faults(make, message):
    with pytest.raises(LayerwaveError, match=message):
        make()
