"""The rows of some shards, in the order of their indexes: row number in, view out."""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import PurePosixPath
from threading import Lock
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import Dataset

from schemas.dataset.entries import ShardEntry
from schemas.dataset.norm import NormWeights, read_norm_file
from schemas.dataset.shard import Shard
from schemas.dataset.states import read_states
from schemas.names import FINAL_NORM_PATH
from service.artifacts.dataset_files import Opens, open_named
from service.reader.errors import ReaderError
from service.reader.places import Places
from service.reader.row import About, Row
from service.reader.views import View

OPEN_SHARDS = 64
"""Shards kept open at once by a dataset, or by all units of a follower."""

THREADS = 2
"""How many threads of a process read at once: one waits for the disk while another copies, norms or also
waits.
"""


class OpenRows:
    """Those of several units' rows that have open shards; together they keep `OPEN_SHARDS` open.

    A follower's block, or rows that a caller holds and reads later, may be of more units than a process can
    have open files, and a unit has a shard of each rank. Safe from several threads.
    """

    def __init__(self) -> None:
        self._rows, self._lock = WeakKeyDictionary[Rows, None](), Lock()

    def make_room(self, rows: "Rows") -> None:
        """Close the shards of whichever opened theirs first, so that `rows` may open another one."""
        with self._lock:
            self._rows.pop(rows, None)
            others = list(self._rows)
            self._rows[rows] = None
            num_open = rows.num_open + sum(each.num_open for each in others)
            for each in others:
                if num_open < OPEN_SHARDS:
                    return
                num_open -= each.num_open
                each.close_shards()
                del self._rows[each]


class Rows(Dataset[Any]):
    """Every row in index order. Safe in DataLoader workers and from several threads."""

    def __init__(
        self,
        files: Opens,
        shards: Iterable[ShardEntry],
        places: Places,
        view: View | None,
        *,
        pin_memory: bool = False,
        direct: bool = False,
        check: bool = False,
        opened: OpenRows | None = None,
        about: About | None = None,
    ) -> None:
        """Read one footer; no states. With `opened`, share its limit. Raises ReaderError.

        `about` is what the manifest says of every shard; without one, it is what the first shard says.
        """
        self._files, self._opened = files, opened
        self._named = {entry.path: entry for entry in shards}
        self._places = places
        self._check_places()
        self.view = view
        self.num_tokens: list[int] = self._places.num_tokens
        """T of every row, for samplers that fill batches by tokens."""
        self._direct, self._pinned, self._check = direct, pin_memory, check
        self._keep_open()
        if not len(self._places):
            raise ReaderError("the dataset holds no rows")
        if about is not None:
            self.about = about  # every shard is held against it, the first one too
        self.about = About.of(self._shard(self._places.shards[0]).provenance)
        norm, hidden_size = self.about.final_norm, self.about.hidden_size
        self._norm: NormWeights = read_norm_file(self._files.open(FINAL_NORM_PATH), norm, hidden_size)
        if view is not None:
            view.check(self.about)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:  # noqa: ANN401 - a Row, or what the view makes of it
        row = self.row(number)
        return row if self.view is None else self.view(row)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return a batch, for torch's DataLoader. With a view, several threads read its rows at once."""
        if self.view is None:
            return [self.row(number) for number in numbers]
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.__getitem__, numbers))

    def row(self, number: int) -> Row:
        """Return a row as stored; its states are read on demand. Raises ReaderError."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        number %= len(self)
        self._shard_with(number)
        ids_T, mask_T = self._places.tokens(number)
        return Row(
            **self._places.light(number),
            input_ids=ids_T,
            loss_mask=mask_T,
            layer_ids=self.about.layer_ids,
            num_layers=self.about.num_layers,
            read=partial(self._states, number),
            norm=self._norm,
        )

    def mapped(self, number: int, layer_ids: tuple[int, ...]) -> torch.Tensor | None:
        """Return states [T, len(layer_ids), H] as a view of a mapped shard; None if they cannot be mapped.

        None, too, where layers are checked. Pages are read when first used. Do not write to the view: later
        calls would see it. Raises ReaderError.
        """
        if self._check:
            return None
        shard, num_tokens = self._shard_with(number), self.num_tokens[number]
        raw = shard.mapped(self._places.rows[number], layer_ids, num_tokens)
        if raw is None:
            return None
        states = torch.from_numpy(raw).view(self.about.dtype)
        return states.view(len(layer_ids), num_tokens, self.about.hidden_size).transpose(0, 1)

    @property
    def num_open(self) -> int:
        """How many shards are open."""
        return self._shard.cache_info().currsize

    def close_shards(self) -> None:
        """Close all shards; each is opened again when one of its rows is read."""
        self._shard.cache_clear()

    def shard_of(self, number: int) -> str:
        """Return the path of the shard that holds a row."""
        return self._places.shards[number]

    def _shard_with(self, number: int) -> Shard:
        """Return the shard of a row. Raises ReaderError if it holds another sample there."""
        shard, row = self._shard(self._places.shards[number]), self._places.rows[number]
        stored, indexed = shard.sample_id(row), self._places.light(number)["sample_id"]
        if stored not in (None, indexed):
            raise ReaderError(f"row {row} of {shard.name} holds sample {stored}, the index says {indexed}")
        return shard

    def _states(self, number: int, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """Return the states of several layers concatenated: [T, len(layer_ids) * H]."""
        # A row does not hold its shard: a list of rows would keep every shard open.
        shard, row, num_tokens = self._shard_with(number), self._places.rows[number], self.num_tokens[number]
        if len(layer_ids) == 1 and not self._pinned:
            return read_states(shard, row, layer_ids[0], num_tokens, check=self._check)
        hidden_size, dtype = self.about.hidden_size, self.about.dtype
        if not layer_ids:  # torch does not view no bytes as another dtype
            return torch.empty((num_tokens, 0), dtype=dtype)
        num_bytes = num_tokens * len(layer_ids) * hidden_size * dtype.itemsize
        if self._pinned:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            # numpy requests huge pages and torch does not, which halves the CPU time.
            memory = torch.from_numpy(np.empty(num_bytes, np.uint8))
        states_TLH = memory.view(dtype).view(num_tokens, len(layer_ids), hidden_size)
        for index, layer_id in enumerate(layer_ids):
            states_TLH[:, index] = read_states(shard, row, layer_id, num_tokens, check=self._check)
        return states_TLH.view(num_tokens, -1)

    def _check_places(self) -> None:
        """Check the row counts of the indexes against those of the manifests' shards. Raises ReaderError."""
        indexed = Counter(self._places.shards)
        for path in {**self._named, **indexed}:
            rows = self._named[path].rows if path in self._named else 0
            if indexed[path] != rows:
                raise ReaderError(f"the indexes hold {indexed[path]} rows of {path}, the manifests {rows}")

    def _keep_open(self) -> None:
        """Begin with no open shard."""
        # In a cycle with its cache, a dataset and its files would stay until a garbage collection, which
        # trainers turn off.
        own: Self = weakref.proxy(self)
        self._shard = lru_cache(OPEN_SHARDS)(lambda path: own._open_shard(path))

    def _open_shard(self, path: str) -> Shard:
        if self._opened is not None:
            self._opened.make_room(self)
        shard = Shard(open_named(self._files, self._named[path], direct=self._direct), path)
        job_id, about = shard.provenance.job_id, About.of(shard.provenance)
        if job_id not in PurePosixPath(path).parts:
            raise ReaderError(f"{path} is a shard of job {job_id}")
        if about != getattr(self, "about", about):
            raise ReaderError(f"{path} holds other states than its job: {about}, not {self.about}")
        return shard

    def __getstate__(self) -> dict[str, Any]:
        """Drop open files: a worker process opens its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_shard"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._keep_open()
