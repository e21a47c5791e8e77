"""Where every row of a dataset is: read from the index files, which hold ids and masks but no states."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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

    def __getitem__(self, number: int) -> Place:
        return Place(self._shards[number], self._rows[number], self.num_tokens[number])

    @property
    def sample_ids(self) -> list[str]:
        """The id of every row's sample."""
        ids: list[str] = self._table["sample_id"].to_pylist()
        return ids

    def light(self, number: int) -> dict[str, Any]:
        """Return a row's `sample_id`, `source_id`, `prompt_tokens`, `input_ids` and `loss_mask`."""
        (row,) = self._table.slice(number, 1).select(_LIGHT).to_pylist()
        return dict(row)


_LIGHT = ["sample_id", "source_id", "prompt_tokens", "input_ids", "loss_mask"]
_COLUMNS = [*_LIGHT, "num_tokens", "shard", "row"]
