"""Where every row of a dataset is: read from the index files, which hold ids and masks but no states."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from service.reader.errors import ReaderError
from service.reader.files import Files

INDEX_FOLDER = "index"


@dataclass(frozen=True, slots=True)
class Place:
    """One row: its shard, its number there, and how many tokens it holds."""

    shard: str
    row: int
    num_tokens: int


class Places:
    """Every row of a dataset in index order; token ids and masks stay in Arrow memory until asked for."""

    def __init__(self, files: Files, jobs: frozenset[str] | None) -> None:
        """Read the indexes of all jobs, or of those named. Raises ReaderError if there are none."""
        paths = [
            path
            for path in files.find(INDEX_FOLDER, ".parquet")
            if jobs is None or path.split("/")[1] in jobs
        ]
        if not paths:
            whose = f"of the jobs {sorted(jobs)}" if jobs is not None else "files"
            raise ReaderError(f"there are no index {whose}: is this the root of a dataset that Quarry made?")
        try:
            tables = [pq.read_table(files.open(path).arrow(), columns=_COLUMNS) for path in paths]
        except (OSError, pa.ArrowException) as error:
            raise ReaderError(f"the index cannot be read: {error}") from error
        self._table: Any = pa.concat_tables(tables).combine_chunks()
        self.num_tokens: list[int] = self._table["num_tokens"].to_pylist()
        """T of every row, for samplers that fill batches by tokens."""
        self._shards: list[str] = self._table["shard"].to_pylist()
        self._rows: list[int] = self._table["row"].to_pylist()

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def shards(self) -> list[str]:
        """The paths of the shards that hold the rows, each once."""
        return list(dict.fromkeys(self._shards))

    def __getitem__(self, number: int) -> Place:
        return Place(self._shards[number], self._rows[number], self.num_tokens[number])

    @property
    def sample_ids(self) -> list[str]:
        """The id of every row's sample."""
        ids: list[str] = self._table["sample_id"].to_pylist()
        return ids

    def supervised_counts(self) -> dict[int, int]:
        """Return how often each token id is supervised. Raises ReaderError for a mask of another length."""
        ids, mask = (pc.list_flatten(self._table[name]) for name in ("input_ids", "loss_mask"))
        if len(ids) != len(mask):
            raise ReaderError(f"the index holds {len(ids)} token ids and {len(mask)} mask flags")
        counts = ids.filter(pc.equal(mask, 1)).value_counts()
        return dict(zip(*(counts.field(at).to_pylist() for at in range(2)), strict=True))

    def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row's token ids, int64 [T], and its mask, uint8 [T]: tensors of their own."""
        ids, mask = (_values(self._table[name], number, dtype) for name, dtype in _LISTS.items())
        return ids.long(), mask

    def light(self, number: int) -> dict[str, Any]:
        """Return a row's `sample_id`, `source_id` and `prompt_tokens`."""
        (row,) = self._table.slice(number, 1).select(_LIGHT).to_pylist()
        return dict(row)


def _values(column: Any, number: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401 - pyarrow's
    """Copy one row of a list column out of Arrow memory."""
    values = column[number].values
    if not len(values):
        return torch.empty(0, dtype=dtype)
    begin = values.offset * dtype.itemsize
    raw = bytearray(memoryview(values.buffers()[1])[begin : begin + len(values) * dtype.itemsize])
    return torch.frombuffer(raw, dtype=dtype)


_LIGHT = ["sample_id", "source_id", "prompt_tokens"]
_LISTS = {"input_ids": torch.int32, "loss_mask": torch.uint8}
_COLUMNS = [*_LIGHT, *_LISTS, "num_tokens", "shard", "row"]
