"""The map-style dataset: row number in, view out."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from schemas.dataset.norm import NormWeights, read_norm_file
from schemas.dataset.shard import Shard
from schemas.dataset.states import read_states
from schemas.names import FINAL_NORM_PATH
from service.artifacts.dataset_files import Files, files_of, open_named
from service.reader.errors import ReaderError
from service.reader.jobs import read_jobs
from service.reader.places import Places
from service.reader.row import About, Row
from service.reader.views import View

OPEN_SHARDS = 64
"""Shards kept open at once by one process."""

THREADS = 2
"""That read at once in one process: one waits for the disk while another copies, norms, or waits as well."""


class QuarryDataset(Dataset[Any]):
    """Every row of a dataset in index order. Safe in DataLoader workers and from several threads."""

    def __init__(
        self,
        where: str | os.PathLike[str] | Files,
        view: View | None = None,
        *,
        jobs: Iterable[str] | None = None,
        since: str | date | None = None,
        revision: str | None = None,
        pin_memory: bool = False,
        direct: bool = False,
    ) -> None:
        """Read the manifests, the indexes that they name and one footer; no states.

        Args:
            where: a folder in the layout of a dataset repository, or `hf://datasets/NAMESPACE/NAME`, or the
                files of either, opened before.
            view: what to make of a row; without one, rows come as they are stored.
            jobs: ids of the jobs whose rows are wanted, each complete; all complete ones if null. A job is
                complete when its manifest is there.
            since: read only jobs whose last state was captured then or later: a day, which begins at midnight
                UTC, or a time with its offset; either may be given as text.
            revision: branch, tag or commit, for a repository.
            pin_memory: read states straight into pinned memory.
            direct: read local shards by O_DIRECT, past the page cache. For shards that are larger together
                than the memory: it takes less CPU than a read from the disk through the cache.

        Raises:
            ReaderError: no dataset, no complete job or not the one named, none since then, jobs of several
                models or layers, or a view it cannot serve.
            OptionRefused, HubUnavailable: the Hub refuses the repository, or does not answer.
        """
        self._files: Files = files_of(where, revision) if isinstance(where, str | os.PathLike) else where
        wanted = frozenset(jobs) if jobs is not None else None
        self.manifests = read_jobs(self._files, wanted, since)
        """Of the jobs that are read, by id: they name every file that is."""
        jobs_read = self.manifests.values()
        self._named = {entry.path: entry for job in jobs_read for entry in job.shards}
        self._places = Places(self._files, [entry for job in jobs_read for entry in job.indexes])
        self._check_places()
        self.view = view
        self.num_tokens: list[int] = self._places.num_tokens
        """T of every row, for samplers that fill batches by tokens."""
        self._direct, self._pinned = direct, pin_memory
        self._shard = lru_cache(OPEN_SHARDS)(self._open_shard)
        if not len(self._places):
            raise ReaderError("the dataset holds no rows")
        self.about = About.of(self._shard(self._places.shards[0]).provenance)
        self._norm: NormWeights = read_norm_file(
            self._files.open(FINAL_NORM_PATH),
            FINAL_NORM_PATH,
            self.about.final_norm,
            self.about.hidden_size,
        )
        if view is not None:
            view.check(self.about)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def sample_ids(self) -> list[str]:
        """The id of every row's sample."""
        return self._places.sample_ids

    def labels(self, name: str) -> list[str | None]:
        """Return a label of every row, null where it has none. Raises ReaderError if no job asked for it."""
        return self._places.labels(name)

    def supervised_counts(self) -> dict[int, int]:
        """Return how often each token id is supervised in all rows, from the index."""
        return self._places.supervised_counts()

    def __getitem__(self, number: int) -> Any:  # noqa: ANN401 - a Row, or what the view makes of it
        row = self.row(number)
        return row if self.view is None else self.view(row)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return a batch, for torch's DataLoader: its rows are read by several threads at once."""
        if self.view is None:
            return [self.row(number) for number in numbers]
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.__getitem__, numbers))

    def row(self, number: int) -> Row:
        """Return a row as it is stored; its states are read when asked for. Raises ReaderError."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        number %= len(self)
        ids_T, mask_T = self._places.tokens(number)
        return Row(
            **self._places.light(number),
            input_ids=ids_T,
            loss_mask=mask_T,
            layer_ids=self.about.layer_ids,
            num_layers=self.about.num_layers,
            read=partial(self._states, self._shard(self._places.shards[number]), number),
            norm=self._norm,
        )

    def shard_of(self, number: int) -> str:
        """Return the path of the shard that holds a row: rows of one shard lie side by side."""
        return self._places.shards[number]

    def _states(self, shard: Shard, number: int, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """Return several layers' states side by side: [T, len(layer_ids) * H]."""
        row, num_tokens = self._places.rows[number], self.num_tokens[number]
        if len(layer_ids) == 1 and not self._pinned:
            return read_states(shard, row, layer_ids[0], num_tokens)
        hidden_size, dtype = self.about.hidden_size, self.about.dtype
        num_bytes = num_tokens * len(layer_ids) * hidden_size * dtype.itemsize
        if self._pinned:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            # numpy asks for huge pages, torch does not: half of the CPU time.
            memory = torch.from_numpy(np.empty(num_bytes, np.uint8))
        states_TLH = memory.view(dtype).view(num_tokens, len(layer_ids), hidden_size)
        for index, layer_id in enumerate(layer_ids):
            states_TLH[:, index] = read_states(shard, row, layer_id, num_tokens)
        return states_TLH.view(num_tokens, -1)

    def _check_places(self) -> None:
        """Hold the rows of the indexes against the shards of the manifests. Raises ReaderError."""
        indexed = Counter(self._places.shards)
        for path in {**self._named, **indexed}:
            rows = self._named[path].rows if path in self._named else 0
            if indexed[path] != rows:
                raise ReaderError(f"the indexes hold {indexed[path]} rows of {path}, the manifests {rows}")

    def _open_shard(self, path: str) -> Shard:
        shard = Shard(open_named(self._files, self._named[path], direct=self._direct), path)
        about = About.of(shard.provenance)
        if about != getattr(self, "about", about):
            raise ReaderError(
                f"{path} holds other states than the first shard ({about} against {self.about}): "
                "name the jobs that belong together in 'jobs'"
            )
        return shard

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files behind: a worker process opens its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_shard"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shard = lru_cache(OPEN_SHARDS)(self._open_shard)
