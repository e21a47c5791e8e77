"""Prefetches the batches of a followed job on each rank, and lets ranks agree on decisions.

Imports speculators: import it lazily.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from speculators.train.distributed import get_dp_rank, get_local_rank, is_distributed

from service.errors import SourceRefused
from service.reader import ReaderError
from service.reader.follow import State

WAIT_S = 20.0
"""Time without a new batch after which a checkpoint is made: capture may be waiting for its
acknowledgement.
"""

Batch = dict[str, Any]
Answer = TypeVar("Answer")


@contextmanager
def refusing_jobs() -> Iterator[None]:
    """Turn a ReaderError in the context into SourceRefused (`live`)."""
    try:
        yield
    except ReaderError as error:
        cure = "look at the job, and begin again with the same --save-path: it goes on behind its checkpoint"
        raise SourceRefused(str(error), field="live", cure=cure) from error


class Ahead:
    """Makes the next batch while the current one is trained on.

    Its daemon thread ends with the process: it may be waiting for a unit that never comes.
    """

    def __init__(self, batches: Iterator[tuple[Batch, State]]) -> None:
        self._ready: Queue[tuple[Batch, State] | Exception | None] = Queue(1)
        self._item: tuple[Batch, State] | None = None
        self.have_ended = False
        Thread(target=self._make, args=(batches,), daemon=True).start()

    @property
    def is_late(self) -> bool:
        """Whether there is no batch now but may be one later."""
        return self._item is None and not self.have_ended

    def wait(self) -> None:
        """Wait for a batch for at most `WAIT_S`. Raises what making it raised."""
        if not self.is_late:
            return
        try:
            item = self._ready.get(timeout=WAIT_S)
        except Empty:
            return
        if isinstance(item, Exception):
            with refusing_jobs():
                raise item
        self._item, self.have_ended = item, item is None

    def take(self) -> tuple[Batch, State] | None:
        """Return the batch, or None if there are no more."""
        item, self._item = self._item, None
        return item

    def _make(self, batches: Iterator[tuple[Batch, State]]) -> None:
        try:
            for batch in batches:
                self._ready.put(batch)
            self._ready.put(None)
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._ready.put(error)


def any_rank(is_so: bool) -> bool:
    """Return whether `is_so` is true on any rank."""
    if not is_distributed():
        return is_so
    flag = torch.tensor(int(is_so), device=get_local_rank() if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def of_first_rank(ask: Callable[[], Answer]) -> Answer:
    """Return the first rank's answer on all ranks: a rank that asked later might get a different one."""
    told: list[Any] = [ask() if get_dp_rank() == 0 else None]
    if is_distributed():
        dist.broadcast_object_list(told)
    answer: Answer = told[0]
    return answer
