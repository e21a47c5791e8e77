"""The iterable dataset: every row once per epoch, split over ranks and workers, shuffled, resumable."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from schemas.digest import canonical_sha256
from service.reader.ahead import made_ahead
from service.reader.dataset import QuarryDataset
from service.reader.epochs import SetEpoch
from service.reader.errors import ReaderError
from service.reader.follow import QuarryFollower, State, placed
from service.reader.rows import THREADS


class QuarryStream(IterableDataset[Any]):
    """Yields this rank's and worker's rows of a `QuarryDataset`.

    The order depends only on `seed` and the epoch: shards are shuffled, then rows within windows of `window`
    rows, so that reads stay local. Each of R ranks takes every R-th row of that order, and each of its W
    workers every W-th of those. With `even`, the last rows, which would give some ranks one row more, are
    dropped, since a rank that ends early hangs collective operations.

    With a view, threads of this process prefetch up to `ahead` rows while one row is in use; with 0, each row
    is read on demand. Without a view, states are read when they are accessed.

    `state_dict` and `load_state_dict` are those of torchdata's StatefulDataLoader, one state per worker,
    valid for the same dataset, order, ranks and workers. Without that loader, `start` skips that many rows of
    this rank in each iteration until an epoch is set. A loader with W workers and batches of B rows has
    consumed exactly the first n rows only if n is a multiple of W * B.

    The rows must not be split a second time: accelerate, and so transformers' Trainer, gives each rank its
    share of what a loader yields, so use `rank=0, world_size=1` with it.
    """

    follow = QuarryFollower
    """`QuarryStream.follow(server, job_id)`: the rows of a job while it is being captured."""

    def __init__(
        self,
        dataset: QuarryDataset,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        window: int = 4096,
        even: bool = True,
        start: int = 0,
        ahead: int = THREADS,
    ) -> None:
        """Take rank and world size from `RANK` and `WORLD_SIZE` if not given. Raises ReaderError."""
        self._dataset = dataset
        self._rank, self._world_size = placed(rank, world_size)
        if window < 1 or start < 0 or ahead < 0:
            raise ReaderError(
                f"window {window} must be at least 1, start {start} and ahead {ahead} at least 0"
            )
        self._shuffle, self._seed, self._window, self._even = shuffle, seed, window, even
        self._start, self._ahead = start, ahead
        self._epoch = self._done = self._skip = 0
        self._set_epoch = SetEpoch()
        self._goes_on = start > 0
        """Whether the next iteration begins at `start` or a loaded state."""
        self._num_workers = 1
        """The number of workers of the loader in which the state was made; 1 without workers."""
        manifests = {job: manifest.sha256 for job, manifest in dataset.manifests.items()}
        # Computed once, since a loader asks for a state with every batch.
        self._jobs_sha256 = canonical_sha256(manifests)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch`, in a different order with nothing skipped.

        A loader's workers begin it with their next iteration.

        If `start` or a loaded state is within that epoch, it continues there.
        """
        self._set_epoch.set(epoch)
        self._hear()

    def _hear(self) -> None:
        epoch = self._set_epoch.news()
        if epoch is not None and not (self._goes_on and epoch == self._epoch):
            self._epoch, self._start, self._done, self._skip, self._goes_on = epoch, 0, 0, 0, False

    def __len__(self) -> int:
        """Return the number of this rank's rows in the epoch, less those that `start` skips."""
        return len(self._turns(range(len(self._dataset))))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self._skip and num_workers != self._num_workers:
            raise ReaderError(f"the state was made with num_workers {self._num_workers}, not {num_workers}")
        if self._goes_on:
            self._set_epoch.forget()  # an epoch set before the state was loaded is for the next iteration
        else:
            self._hear()
        self._done, self._skip, self._goes_on = self._skip, 0, False
        return self._counted(self._turns(self.order())[worker::num_workers][self._done :])

    def _counted(self, numbers: Sequence[int]) -> Iterator[Any]:
        for row in self._rows(numbers):
            self._done += 1
            yield row

    def state_dict(self) -> State:
        """Return this worker's position."""
        info = get_worker_info()
        done, num_workers = self._done, info.num_workers if info else 1
        if self._goes_on:  # no iteration has begun from the loaded state
            done, num_workers = self._skip, self._num_workers
        place = {"epoch": self._epoch, "start": self._start, "done": done, "num_workers": num_workers}
        return place | self._made_with()

    def load_state_dict(self, state: State) -> None:
        """Let the next iteration continue from a worker's state.

        Raises ReaderError if the jobs, the number of ranks or the order differ, since the position would be a
        different one. If the number of workers differs, the next iteration raises it.
        """
        for name, value in self._made_with().items():
            if state.get(name) != value and (state["start"] or state["done"]):
                raise ReaderError(f"the state was made with {name} {state.get(name)}, not {value}")
        self._epoch, self._start, self._skip = state["epoch"], state["start"], state["done"]
        self._num_workers, self._goes_on = state["num_workers"], True

    def _made_with(self) -> State:
        """Return what determines a row's position in this rank's order."""
        order = {"shuffle": self._shuffle, "seed": self._seed, "window": self._window, "even": self._even}
        return order | {"jobs": self._jobs_sha256, "world_size": self._world_size}

    def order(self) -> list[int]:
        """Return the epoch's row numbers in their global order over all ranks."""
        numbers = list(range(len(self._dataset)))
        if not self._shuffle:
            return numbers
        draw = random.Random(f"{self._seed}/{self._epoch}")  # noqa: S311 - an order, not a secret
        by_shard: dict[str, list[int]] = {}
        for number in numbers:
            by_shard.setdefault(self._dataset.shard_of(number), []).append(number)
        shards = list(by_shard.values())
        draw.shuffle(shards)
        ordered = [number for shard in shards for number in shard]
        for begin in range(0, len(ordered), self._window):
            part = ordered[begin : begin + self._window]
            draw.shuffle(part)
            ordered[begin : begin + self._window] = part
        return ordered

    def _rows(self, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the rows in this order, whichever is read first; an error is raised in its row's place."""
        row = self._dataset.__getitem__
        if not self._ahead or self._dataset.view is None:
            return map(row, numbers)
        return made_ahead(row, numbers, ahead=self._ahead, threads=min(self._ahead, THREADS))

    def _turns(self, ordered: Sequence[int]) -> Sequence[int]:
        """Return this rank's share of the numbers."""
        if self._even:
            ordered = ordered[: len(ordered) // self._world_size * self._world_size]
        return ordered[self._rank :: self._world_size][self._start :]
