"""Token counts: exact whatever the order, the same bytes, and every difference named."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from schemas.dataset import token_counts
from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import Coverage
from schemas.dataset.token_counts import (
    TOKEN_FREQ_SCHEMA,
    TokenTally,
    differences,
    packed_counts,
    read_counts,
    vocabulary_stats,
)

ROWS = st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=12)


@given(ROWS, st.integers(1, 20))
def test_rows_are_counted_exactly_however_often_they_are_merged(rows, pending):
    tally = TokenTally()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_counts, "_PENDING_TOKENS", pending)
        for row in rows:
            tally.add(np.asarray(row, np.int32))
    assert tally.counts() == Counter(token for row in rows for token in row)


def test_the_coverage_is_of_the_most_frequent_tokens():
    counts = Counter([5] * 7 + [9] * 2 + [1] * 2 + [3])
    assert vocabulary_stats(counts, (1, 3, 4)).coverage == (
        Coverage(draft_vocab=1, tokens=7),
        Coverage(draft_vocab=3, tokens=11),
    )
    assert vocabulary_stats(counts).token_ids == 4


def test_counts_are_read_as_they_were_written():
    content = packed_counts(Counter([7, 2, 7]))
    assert read_counts(content, "counts") == {2: 1, 7: 2}
    assert packed_counts(Counter([2, 7, 7])) == content


@pytest.mark.parametrize(
    ("ids", "times"), [([2, 1], [1, 1]), ([1, 1], [1, 1]), ([-1, 1], [1, 1]), ([1, 2], [1, 0])]
)
def test_counts_that_are_none_are_refused(tmp_path: Path, ids, times):
    pq.write_table(pa.table([ids, times], schema=TOKEN_FREQ_SCHEMA), tmp_path / "counts")
    with pytest.raises(DatasetError, match="counts: token ids do not ascend"):
        read_counts((tmp_path / "counts").read_bytes(), "counts")


def test_another_file_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"token": [1]}), tmp_path / "counts")
    with pytest.raises(DatasetError, match="columns are not those"):
        read_counts((tmp_path / "counts").read_bytes(), "counts")
    with pytest.raises(DatasetError, match="cannot be read"):
        read_counts(b"PAR1 this is none", "counts")


def test_every_difference_is_named_up_to_a_few():
    stored, right = Counter([1, 1, 2, 4, 6]), Counter([1, 2, 3, 5, 6])
    assert list(differences(stored, right)) == [
        "counts token 1 2 times, expected 1",
        "counts token 3 0 times, expected 1",
        "counts token 4 1 times, expected 0",
        "counts 1 more tokens wrong",
    ]
    assert list(differences(right, right)) == []
