"""The rows of a job while it is being captured: each once per epoch, as its units are committed."""

import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from schemas.dataset.files import LocalFile, RangeFile
from schemas.job import ENDED_JOB_STATES, RESTING_JOB_STATES, JobState, UnitPage, UnitView
from schemas.names import FINAL_NORM_PATH
from service.artifacts.dataset_files import HUB_PREFIX, HubFiles
from service.errors import OptionRefused
from service.reader.epochs import SetEpoch
from service.reader.errors import ReaderError
from service.reader.places import read_places
from service.reader.published import PublishedJob, patiently
from service.reader.row import About
from service.reader.rows import OpenRows, Rows
from service.reader.served import LOOK_S, NotServed, ServedFile, ServedJob
from service.reader.views import View

WAIT_S = 25
"""How long one request for the next unit waits for it."""

State = dict[str, Any]
"""The state of one worker: its settings and its position. JSON-serializable."""

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """A position in the order of units, and the number of rows in all units up to it."""

    after: int
    seen: int


START = Place(-1, 0)


def placed(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size, from `RANK` and `WORLD_SIZE` where they are None. Raises ReaderError."""
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ReaderError(f"rank {rank} of {world_size} does not exist")
    return rank, world_size


class QuarryFollower(IterableDataset[Any]):
    """Yields this rank's and worker's rows of a job while it is being captured, or after it is completed.

    Units are read in the order of their commits. Rows keep that order, or are shuffled within blocks of
    `window` rows, each of which is yielded only once it is complete. Row n of that order goes to rank n % R,
    and there to loader worker (n // R) % W. With `even`, a row is held back until every rank has one, and the
    last rows, which would give some ranks one row more, are dropped, since a rank that ends early hangs
    collective operations.

    Iteration waits for each unit, also while the job is paused or blocked, which is logged once, and ends
    when the job is completed. Shards are read in place: from the data folder if this host has it, otherwise
    in ranges from the service, or from the job's repository once they are only there. Nothing is copied to
    disk.

    `state_dict` and `load_state_dict` are those of torchdata's StatefulDataLoader, one state per worker. A
    state is valid only for the job, the order of units and the numbers of ranks and workers that it was made
    with.

    Iterating raises ReaderError if the job has failed or was cancelled or deleted, if the key is refused, or
    if the service gives no valid answer for `patience_s`. Rows of units committed before that are yielded
    first; after a `resume` of the job, iteration can continue from the last state. It raises HubUnavailable
    if the repository does not answer.

    A job may also be followed through its dataset alone, a folder or a repository, which records neither the
    order of commits nor a job's failure: rows are yielded once the job is published, in the plan's order. A
    job that has captured nothing new is never published.
    """

    def __init__(
        self,
        server: str | os.PathLike[str],
        job_id: str,
        view: View | None = None,
        *,
        key: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        window: int = 1,
        seed: int = 0,
        even: bool = True,
        patience_s: float = 600.0,
        pin_memory: bool = False,
        direct: bool = False,
        check: bool = False,
    ) -> None:
        """Store the options; nothing is requested yet.

        Args:
            server: base URL of the service; or the job's dataset, `hf://datasets/NAMESPACE/NAME` or a folder
                (existing, or an absolute path), in which case the job is waited for until it is published.
            job_id: the job; it must have been submitted.
            view: converts rows for training; without one, rows are returned as stored.
            key: API key that may read jobs; from QUARRY_KEY or QUARRY_KEY_FILE if None.
            folder: where this host has the job's dataset, if it is not the path that the service reports.
            rank: rank of this process; `RANK` if None.
            world_size: how many ranks there are; `WORLD_SIZE` if None.
            window: how many rows are shuffled together; 1 keeps the order.
            seed: seed of the shuffling.
            even: give every rank the same number of rows.
            patience_s: how long to tolerate a service or Hub that does not answer, a missing file, or an
                incomplete manifest.
            pin_memory: as for `QuarryDataset`.
            direct: as for `QuarryDataset`.
            check: as for `QuarryDataset`.

        Raises:
            ReaderError: invalid rank or window, or `server` is not something that can be followed.
        """
        self._rank, self._world_size = placed(rank, world_size)
        if window < 1:
            raise ReaderError(f"window {window} must be at least 1")
        where = os.fspath(server)
        self._served: Callable[[], ServedJob | PublishedJob]
        if where.startswith(("http://", "https://")):
            self._served, self._order = partial(ServedJob, where, job_id, key, patience_s), "commits"
        elif where.startswith(HUB_PREFIX) or Path(where).is_absolute() or (where and Path(where).is_dir()):
            self._served, self._order = partial(PublishedJob, where, job_id, patience_s), "plan"
        else:  # waiting for a folder of such a name would never end
            raise ReaderError(f"{where!r} is no http:// address, {HUB_PREFIX} repository or folder here")
        self._job_id, self._patience_s = job_id, patience_s
        self._rows_of = partial(Rows, view=view, pin_memory=pin_memory, direct=direct, check=check)
        self._folder, self._window, self._seed, self._even = folder, window, seed, even
        self._epoch, self._set_epoch = 0, SetEpoch()
        self._loaded: State = {}
        self._end = START
        """The position after the last unit, once it is known."""
        self._state = self._at(START, 0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch`, with a different shuffle and nothing skipped.

        A loader's workers begin it with their next iteration. If a loaded state is within that epoch, the
        epoch continues from the state.
        """
        self._set_epoch.set(epoch)
        self._hear()

    def _hear(self) -> None:
        epoch = self._set_epoch.news()
        if epoch is not None and not (self._loaded and epoch == self._epoch):
            self._epoch, self._loaded = epoch, {}
            self._state = self._at(START, 0, 0)

    def state_dict(self) -> State:
        """Return this worker's position."""
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration continue from a worker's state. Raises ReaderError if of another job."""
        if state.keys() != self._state.keys():
            raise ReaderError(f"no state of a follower: it has {', '.join(sorted(state)) or 'nothing'}")
        for name in ("job", "order"):
            if state[name] != self._state[name]:
                raise ReaderError(f"the state was made with {name} {state[name]}, not {self._state[name]}")
        self._epoch, self._loaded, self._state = state["epoch"], dict(state), dict(state)

    def acknowledge(self, consumer: str, states: Iterable[State] = (), expires_s: int | None = None) -> None:
        """Let the service remove the units of a job with `retention: consumed` that no state needs any more.

        Args:
            consumer: a name for all ranks and workers together: lower-case letters, digits, `.`, `_`, `-`.
            states: the states of all ranks and workers, once a checkpoint holds them. Before the first
                checkpoint there are none, and the call only registers the consumer.
            expires_s: seconds without a call after which the service stops waiting for this consumer.

        Raises:
            ReaderError: the service refuses the call, or does not answer.
        """
        after = min((state["after"] for state in states), default=-1)
        self._served().acknowledge(consumer, after, expires_s)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self._loaded:
            self._set_epoch.forget()  # an epoch set before the state was loaded is for the next iteration
        else:
            self._hear()
        fresh = self._at(START, 0, num_workers)
        start, self._loaded = self._loaded or fresh, {}
        for name in ("world_size", "num_workers", "window", "seed"):
            if start["next"] and start[name] != fresh[name]:
                raise ReaderError(f"the state was made with {name} {start[name]}, not {fresh[name]}")
        self._state = start
        return self._mine(start, worker, num_workers)

    def _mine(self, start: State, worker: int, num_workers: int) -> Iterator[Any]:
        """Yield this worker's rows, starting at a state."""
        mine = None
        for number, begin, unit, index in self._ordered(start):
            group, rank = divmod(number, self._world_size)
            if rank == self._rank and group % num_workers == worker and number >= start["next"]:
                mine = unit, index
            if mine is not None and (rank == self._world_size - 1 or not self._even):
                unit, index = mine
                row = unit.rows[index]
                self._state, mine = self._at(begin, number + 1, num_workers), None
                yield row
        self._state = self._at(self._end, self._end.seen, num_workers)

    def _at(self, begin: Place, following: int, num_workers: int) -> State:
        """Return a state in which rows below `following` are done, and the block of the next row begins in a
        unit after `begin`.
        """
        made_with = {"job": self._job_id, "order": self._order, "window": self._window, "seed": self._seed}
        shares = {"world_size": self._world_size, "num_workers": num_workers}
        place = {"epoch": self._epoch, "after": begin.after, "seen": begin.seen, "next": following}
        return made_with | shares | place

    def _ordered(self, start: State) -> "Iterator[tuple[int, Place, _Unit, int]]":
        """Yield all ranks' rows in order, starting with the block of row `next`.

        Each is yielded as its number, where the next row's block begins, its unit, and its index in that
        unit.
        """
        # No row comes after the last block, which may be short.
        number = max(start["next"] // self._window * self._window, start["seen"])
        every = ((unit, index) for unit in self._units(start) for index in range(unit.num_rows))
        places = islice(every, number - start["seen"], None)
        while block := list(islice(places, self._window)):
            (first, _), (last, index) = block[0], block[-1]
            behind = last.behind if index + 1 == last.num_rows else last.begin
            draw = random.Random(f"{self._seed}/{self._epoch}/{number}")  # noqa: S311 - an order, no secret
            draw.shuffle(block)
            for left, (unit, index) in zip(reversed(range(len(block))), block, strict=True):
                yield number, first.begin if left else behind, unit, index
                number += 1

    def _units(self, start: State) -> "Iterator[_Unit]":
        """Yield the units after the position `after` as they are committed, until the job is completed."""
        served, begin = self._served(), Place(start["after"], start["seen"])
        repository = _Repository(self._patience_s)
        rows_of, said = partial(self._rows_of, opened=OpenRows()), None
        while _is_wanted():
            page = served.page(begin.after, WAIT_S)
            if page.units:
                where = self._folder, repository, self._patience_s
                unit = _Unit(_UnitFiles(served, page, begin.after, *where), begin, rows_of)
                yield unit
                begin = unit.behind
            elif page.state is JobState.COMPLETED:
                self._end = begin
                return
            elif page.state in ENDED_JOB_STATES:
                raise ReaderError(f"{served.name} is {page.state}{served.problem()}")
            elif page.state in RESTING_JOB_STATES:
                if page.state is not said:
                    logger.warning("%s is %s%s; waiting", served.name, page.state, served.problem())
                time.sleep(LOOK_S)
            said = page.state


def _is_wanted() -> bool:
    """Return whether the rows are still wanted: a loader worker's parent may have been killed."""
    parent = parent_process() if get_worker_info() is not None else None
    return parent is None or parent.is_alive()


class _Repository:
    """The repository that a job is pushed to; its newest commit is fetched if a file is not known."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._files: HubFiles | None = None

    def open(self, repo_id: str, path: str) -> RangeFile:
        def find() -> RangeFile:
            with suppress(OptionRefused):  # the commit that is known may be gone
                if self._files is not None and self._files.has(path):
                    return self._files.open(path)
            self._files = HubFiles(repo_id)
            return self._files.open(path)

        return patiently(find, self._patience_s)


class _Unit:
    """A committed unit; its rows are opened on demand."""

    def __init__(self, files: "_UnitFiles", begin: Place, rows_of: partial[Rows]) -> None:
        """Take the unit that follows the position `begin`; nothing is opened yet."""
        self._files, self._rows_of = files, rows_of
        self.num_rows = sum(shard.rows for shard in files.unit.shards)
        self.begin, self.behind = begin, Place(files.page.next_after, begin.seen + self.num_rows)

    @cached_property
    def rows(self) -> Rows:
        """The unit's rows."""
        unit = self._files.unit
        if unit.index is None:
            raise ReaderError(f"unit {unit.unit} has {self.num_rows} rows and no index")
        places = read_places(self._files, [unit.index], check=self._rows_of.keywords["check"])
        if len(places) != self.num_rows:
            shards = f"the entries of its shards {self.num_rows}"
            raise ReaderError(f"{unit.index.path} holds {len(places)} rows, {shards}")
        rows = self._rows_of(self._files, unit.shards, places, about=self._files.about)
        self._files.about = rows.about
        return rows


class _UnitFiles:
    """The files of a committed unit, wherever they are.

    They know nothing of the rows that are read from them: in a cycle, these and their open files would stay
    until a garbage collection, which trainers turn off.
    """

    def __init__(
        self,
        served: ServedJob | PublishedJob,
        page: UnitPage,
        after: int,
        folder: str | os.PathLike[str] | None,
        repository: _Repository,
        patience_s: float,
    ) -> None:
        """Take the files of `page`, which follows the position `after`; nothing is opened yet."""
        self._served, self.page, self._after, self._folder = served, page, after, folder
        self._repository, self._patience_s = repository, patience_s

    @property
    def unit(self) -> UnitView:
        """The unit, as last heard of."""
        (unit,) = self.page.units
        return unit

    @property
    def about(self) -> About | None:
        """What the job's manifest says of its shards, or else what those that were read say."""
        return self._served.about

    @about.setter
    def about(self, about: About) -> None:
        self._served.about = about

    def open(self, path: str, *, direct: bool = False) -> RangeFile:
        """Open a file; wait for it if it was committed and has not arrived yet.

        Raises ReaderError if the file is not there after the job has ended or `patience_s` have passed.
        """
        asked_s, is_said = time.monotonic(), False
        while True:
            try:
                return self._open(path, direct=direct)
            except NotServed as error:
                page = self._served.page(self._after)
                if page.units and page.units != self.page.units:
                    self.page = page
                    continue
                if self.unit.in_repository and self.page.repository is not None:
                    return self._repository.open(self.page.repository, path)
                if page.state in ENDED_JOB_STATES or time.monotonic() - asked_s > self._patience_s:
                    raise
                if not is_said:
                    logger.warning("%s; waiting for it", error)
                    is_said = True
                time.sleep(LOOK_S)

    def _open(self, path: str, *, direct: bool) -> RangeFile:
        """Raises NotServed."""
        folder = self.page.folder if self._folder is None else self._folder
        unit = self.unit
        sizes = {entry.path: entry.bytes for entry in (*unit.shards, unit.index) if entry is not None}
        if not (unit.in_folder or unit.in_repository):
            raise ReaderError(f"unit {unit.unit} of {self._served.name} is gone: every consumer had it")
        if unit.in_folder or path == FINAL_NORM_PATH:
            if folder is not None and path in sizes:
                with suppress(OSError):  # another host's folder, or one that we may not read
                    file = LocalFile(Path(folder) / path, direct=direct)
                    if file.num_bytes == sizes[path]:
                        return file  # otherwise it is still being copied
            return ServedFile(self._served, path, partial(self.open, path, direct=direct))
        if isinstance(self._served, PublishedJob):
            return self._served.published.open(path)
        if self.page.repository is None:
            raise ReaderError(f"{self._served.name}: the service does not say where its units are")
        return self._repository.open(self.page.repository, path)
