"""Counts how often each token is supervised: from rows, in a job's `token_freq` file, and compares counts."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import Coverage, VocabularyStats
from schemas.dataset.tables import read_table, table_bytes

TOKEN_FREQ_SCHEMA = pa.schema(
    [pa.field("token_id", pa.int32(), nullable=False), pa.field("count", pa.int64(), nullable=False)]
)
COVERAGE_SIZES = (8_000, 16_000, 32_000, 64_000)
"""Draft vocabulary sizes that trainers commonly use; the manifest has the coverage of each."""
_PENDING_TOKENS = 2**20
_SHOWN = 3


class TokenTally:
    """Counts tokens row by row; many rows are sorted at once and then added to the dict."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._pending: list[NDArray[np.integer]] = []
        self._tokens = 0

    def add(self, supervised: NDArray[np.integer]) -> None:
        """Count the token ids of one or more rows, a one-dimensional array."""
        self._pending.append(supervised)
        self._tokens += len(supervised)
        if self._tokens >= _PENDING_TOKENS:
            self.counts()

    def counts(self) -> Counter[int]:
        """Return the counts of everything added so far; the object belongs to the tally."""
        if self._pending:
            ids, times = np.unique(np.concatenate(self._pending), return_counts=True)
            self._counts.update(dict(zip(ids.tolist(), times.tolist(), strict=True)))
            self._pending, self._tokens = [], 0
        return self._counts


def vocabulary_stats(counts: Counter[int], sizes: Iterable[int] = COVERAGE_SIZES) -> VocabularyStats:
    """Return a manifest's statistics of counts, for those `sizes` that do not cover every id anyway."""
    falling = sorted(counts.values(), reverse=True)
    coverage = [
        Coverage(draft_vocab=size, tokens=sum(falling[:size])) for size in sizes if size < len(falling)
    ]
    return VocabularyStats(token_ids=len(falling), coverage=tuple(coverage))


def packed_counts(counts: Counter[int]) -> bytes:
    """Return counts as the content of a `token_freq` file; the same counts give the same bytes."""
    ids = sorted(counts)
    columns = {"token_id": ids, "count": [counts[token] for token in ids]}
    # Delta encoding takes one byte for each ascending id, a fifth of the size otherwise.
    return table_bytes(
        pa.table(columns, schema=TOKEN_FREQ_SCHEMA),
        use_dictionary=["count"],
        column_encoding={"token_id": "DELTA_BINARY_PACKED"},
    )


def read_counts(content: bytes, name: str) -> Counter[int]:
    """Read a `token_freq` file called `name`. Raises DatasetError."""
    try:
        table = read_table(pa.BufferReader(content))
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{name} cannot be read: {error}") from error
    if not table.schema.equals(TOKEN_FREQ_SCHEMA):
        raise DatasetError(f"{name}: its columns are not those of token counts")
    ids, times = (table[field].to_numpy() for field in TOKEN_FREQ_SCHEMA.names)
    if (len(ids) and (ids[0] < 0 or times.min() < 1)) or not np.all(ids[1:] > ids[:-1]):
        raise DatasetError(f"{name}: token ids do not ascend, or one is counted less than once")
    return Counter(dict(zip(ids.tolist(), times.tolist(), strict=True)))


def differences(stored: Counter[int], right: Counter[int]) -> Iterator[str]:
    """Describe the tokens whose count in `stored` differs from `right`: the first few, and how many more."""
    wrong = [token for token in sorted(stored.keys() | right.keys()) if stored[token] != right[token]]
    for token in wrong[:_SHOWN]:
        yield f"counts token {token} {stored[token]} times, expected {right[token]}"
    if len(wrong) > _SHOWN:
        yield f"counts {len(wrong) - _SHOWN} more tokens wrong"
