"""The place of every row of a dataset, from the index files, which hold token ids and masks but no states."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from schemas.dataset.columns import INDEX_SCHEMA, LABEL_PREFIX
from schemas.dataset.entries import FileEntry
from schemas.dataset.files import RangeFile
from schemas.dataset.tables import read_table
from schemas.dataset.token_counts import TokenTally
from service.artifacts.dataset_files import Opens, open_named
from service.reader.errors import ReaderError


class Places:
    """Every row of a dataset in index order; token ids and masks stay in Arrow memory until asked for."""

    def __init__(self, table: pa.Table) -> None:
        """Take the columns `COLUMNS` of a table, which may be memory-mapped."""
        self.table = table.select(COLUMNS)
        self._columns: dict[str, Any] = {name: self.table[name] for name in COLUMNS}
        self.num_tokens: list[int] = self._columns["num_tokens"].to_pylist()
        """T of every row, for samplers that fill batches by tokens."""
        self.shards: list[str] = self._columns["shard"].to_pylist()
        """The path of every row's shard."""
        self.rows: list[int] = self._columns["row"].to_pylist()
        """Every row's number in its shard."""

    def __len__(self) -> int:
        return len(self.num_tokens)

    def supervised_counts(self) -> dict[int, int]:
        """Return how often each token id is supervised."""
        tally = TokenTally()
        for lists in zip(*(self._columns[name].chunks for name in _LISTS), strict=True):
            ids, mask = (chunk.flatten().to_numpy() for chunk in lists)
            tally.add(ids[mask == 1])
        return tally.counts()

    def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row's token ids, int64 [T], and its mask, uint8 [T], as copies."""
        ids, mask = (self._columns[name][number].values.to_numpy() for name in _LISTS)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(mask)

    def light(self, number: int) -> dict[str, Any]:
        """Return a row's `sample_id`, `source_id` and `prompt_tokens`."""
        return {name: self._columns[name][number].as_py() for name in _LIGHT}


def read_places(files: Opens, indexes: Sequence[FileEntry], *, check: bool = False) -> Places:
    """Read indexes; with `check`, hold each against its sha256. Raises ReaderError."""
    # Chunks are not combined: a list array has 32-bit offsets, and a dataset may hold more tokens than that.
    # A row's chunk is found by bisection.
    tables = [_read_index(files, entry, check) for entry in indexes]
    return Places(pa.concat_tables(tables or [_SCHEMA.empty_table()]))


def read_labels(files: Opens, indexes: Sequence[FileEntry], name: str) -> list[str | None]:
    """Return a label of every row. Raises ReaderError if an index does not have it."""
    column = f"{LABEL_PREFIX}{name}"
    values: list[str | None] = []
    try:
        for entry in indexes:
            file = open_named(files, entry)
            values += read_table(file.arrow(), columns=[column])[column].to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ReaderError(f"label {name!r} cannot be read: {error}") from error
    return values


def _read_index(files: Opens, entry: FileEntry, check: bool) -> pa.Table:
    """Read the columns `COLUMNS` of an index. Raises ReaderError if it is unreadable or inconsistent."""
    try:
        file = open_named(files, entry)
        source = _checked(file, entry) if check else file.arrow()
        table = read_table(source, columns=COLUMNS).select(COLUMNS)
    except (OSError, MemoryError, pa.ArrowException) as error:
        raise ReaderError(f"{entry.path} cannot be read: {error}") from error
    if not table.schema.equals(_SCHEMA):
        raise ReaderError(f"{entry.path}: its columns are not those of an index")
    for name in _LISTS:
        if not pc.list_value_length(table[name]).equals(table["num_tokens"]):
            raise ReaderError(f"{entry.path}: {name} and num_tokens differ in length")
    return table


def _checked(file: RangeFile, entry: FileEntry) -> pa.BufferReader:
    """Return the content of a file. Raises ReaderError if it is not what was sealed."""
    content = file.read(0, file.num_bytes)
    if (sha256 := hashlib.sha256(content.data).hexdigest()) != entry.sha256:
        raise ReaderError(f"{entry.path} has sha256 {sha256}, {entry.sha256} was sealed")
    return pa.BufferReader(content)


_LIGHT = ["sample_id", "source_id", "prompt_tokens"]
_LISTS = ["input_ids", "loss_mask"]
COLUMNS = [*_LIGHT, *_LISTS, "num_tokens", "shard", "row"]
_SCHEMA = pa.schema([INDEX_SCHEMA.field(name) for name in COLUMNS])
