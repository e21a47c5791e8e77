"""How often each token is supervised: counted from rows, kept in a job's `token_freq` file, and compared.

Legend: D different token ids.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from schemas.dataset.errors import DatasetError
from schemas.dataset.manifest import Coverage, VocabularyStats

TOKEN_FREQ_SCHEMA = pa.schema(
    [pa.field("token_id", pa.int32(), nullable=False), pa.field("count", pa.int64(), nullable=False)]
)
COVERAGE_SIZES = (8_000, 16_000, 32_000, 64_000)
"""Draft vocabularies that the manifest tells the coverage of: those that trainers commonly take."""
_PENDING_TOKENS = 2**20
_SHOWN = 3

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """`ids` ascending and how many `times` each was supervised, at least once; both int64 [D]."""

    ids: Ids
    times: Ids

    @classmethod
    def of(cls, supervised: ArrayLike) -> Self:
        """Count the token ids in `supervised`, of any shape."""
        ids, times = np.unique(np.asarray(supervised, dtype=np.int64), return_counts=True)
        return cls(ids, times.astype(np.int64))

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        ids, place = np.unique(np.concatenate([self.ids, other.ids]), return_inverse=True)
        times = np.zeros(len(ids), dtype=np.int64)
        np.add.at(times, place, np.concatenate([self.times, other.times]))
        return TokenCounts(ids, times)

    @property
    def total(self) -> int:
        """The number of supervised tokens."""
        return int(self.times.sum())

    def by_id(self) -> dict[int, int]:
        """Return the counts as a dict, ordered by token id."""
        return dict(zip(self.ids.tolist(), self.times.tolist(), strict=True))

    def stats(self, sizes: Iterable[int] = COVERAGE_SIZES) -> VocabularyStats:
        """Return what a manifest says of the counts; of `sizes`, those that do not hold every id anyway."""
        falling = np.sort(self.times)[::-1]
        coverage = tuple(
            Coverage(draft_vocab=size, tokens=int(falling[:size].sum()))
            for size in sizes
            if size < len(self.ids)
        )
        return VocabularyStats(token_ids=len(self.ids), coverage=coverage)


class TokenTally:
    """Counts row by row, merging seldom: a merge costs as much as all ids seen so far."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._done = TokenCounts.of([])
        self._pending: list[NDArray[np.integer]] = []
        self._tokens = 0

    def add(self, supervised: NDArray[np.integer]) -> None:
        """Count the token ids of a row or of several, one-dimensional."""
        self._pending.append(supervised)
        self._tokens += len(supervised)
        if self._tokens >= _PENDING_TOKENS:
            self.counts()

    def counts(self) -> TokenCounts:
        """Return the counts of everything added so far."""
        if self._pending:
            self._done += TokenCounts.of(np.concatenate(self._pending))
            self._pending, self._tokens = [], 0
        return self._done


def write_counts(file: Path, counts: TokenCounts) -> None:
    """Write counts as a `token_freq` file; the same counts give the same bytes. Raises OSError."""
    columns = [pa.array(counts.ids, pa.int32()), pa.array(counts.times, pa.int64())]
    pq.write_table(pa.table(columns, schema=TOKEN_FREQ_SCHEMA), file, compression="zstd")


def read_counts(content: bytes, name: str) -> TokenCounts:
    """Read a `token_freq` file called `name`. Raises DatasetError."""
    try:
        table = pq.read_table(BytesIO(content))
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{name} cannot be read: {error}") from error
    if not table.schema.equals(TOKEN_FREQ_SCHEMA):
        raise DatasetError(f"{name}: its columns are not those of token counts")
    ids, times = (table[field].to_numpy().astype(np.int64) for field in TOKEN_FREQ_SCHEMA.names)
    if (len(ids) and (ids[0] < 0 or times.min() < 1)) or not np.all(np.diff(ids) > 0):
        raise DatasetError(f"{name}: token ids do not ascend, or one is counted less than once")
    return TokenCounts(ids, times)


def differences(told: TokenCounts, due: TokenCounts) -> Iterator[str]:
    """Say which tokens `told` counts otherwise than `due`: the first few, and how many more."""
    found, right = told.by_id(), due.by_id()
    wrong = [one for one in sorted(found.keys() | right.keys()) if found.get(one, 0) != right.get(one, 0)]
    for one in wrong[:_SHOWN]:
        yield f"counts token {one} {found.get(one, 0)} times, {right.get(one, 0)} is due"
    if len(wrong) > _SHOWN:
        yield f"counts {len(wrong) - _SHOWN} more tokens wrongly"
