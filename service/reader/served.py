"""A job of a running service: its committed units one by one, and byte ranges of its data folder's files."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from schemas.dataset.files import RangeFile, arrow_file
from schemas.dataset.memory import Bytes
from schemas.job import JobSummary, UnitPage
from service.client import ProblemReceived, Quarry
from service.reader.errors import ReaderError
from service.reader.row import About

LOOK_S = 1.0
"""Time between two requests to a service that does not answer, or for something that does not exist yet."""
BUFFER_BYTES = 2**18

P = ParamSpec("P")
Answer = TypeVar("Answer")


class NotServed(ReaderError):
    """The service does not have the file, or no longer has it."""


class ServedJob:
    """One job of a service. Waits if the service does not answer, since it may be restarting."""

    about: About | None = None
    """What the first shard read says: a job has no manifest yet while it is captured."""

    def __init__(self, server: str, job_id: str, key: str | None, patience_s: float) -> None:
        """Connect at the first call; every call retries for `patience_s` without a valid answer.

        Raises ReaderError if the key cannot be read.
        """
        try:
            self._quarry = Quarry(server, key)
        except (OSError, ProblemReceived) as error:
            raise ReaderError(f"the key of {server} cannot be read: {error}") from error
        self._id, self._patience_s = job_id, patience_s
        self.name = f"job {job_id} of {server}"

    def __del__(self) -> None:
        with suppress(AttributeError):  # without a key there is no client
            self._quarry.close()  # rows without a view may read until they are deleted

    def page(self, after: int, wait_s: int = 0) -> UnitPage:
        """Return the next unit after the position `after`; none if none is committed within `wait_s`.

        Raises ReaderError, as do the two below: no such job, the key is refused, or no answer in time.
        """
        return self._ask(self._quarry.unit_page, self._id, after=after, limit=1, wait_s=wait_s)

    def summary(self) -> JobSummary:
        """Return the job's current state. Raises ReaderError."""
        return self._ask(self._quarry.job, self._id)

    def problem(self) -> str:
        """Return why the job is not running, or an empty string if it has no problem."""
        problem = self.summary().problem
        return f": {problem.detail}" if problem else ""

    def file_range(self, path: str, offset: int, num_bytes: int) -> tuple[bytes, int]:
        """Return a range of a file, shorter at its end, and the file's length. Raises NotServed, too."""
        part = self._ask(self._quarry.file, self._id, path, offset=offset, num_bytes=num_bytes)
        return part.content, part.num_bytes

    def acknowledge(self, consumer: str, after: int, expires_s: int | None) -> None:
        """Report that a consumer has all units up to the position `after`. Raises ReaderError."""
        self._ask(self._quarry.acknowledge, self._id, consumer, after, expires_s=expires_s)

    def _ask(self, method: Callable[P, Answer], *arguments: P.args, **options: P.kwargs) -> Answer:
        """Return the answer of `method`, retried while the service does not answer. Raises ReaderError."""
        asked_s = time.monotonic()
        while True:
            try:
                return method(*arguments, **options)
            except ProblemReceived as error:
                problem, waited_s = error.problem, time.monotonic() - asked_s
                if not error.is_passing or waited_s > self._patience_s:
                    kind = NotServed if problem.status == 404 else ReaderError
                    raise kind(f"{self.name}: {problem.detail}") from None
            time.sleep(LOOK_S)


class Ranges(Protocol):
    """A source of file ranges."""

    def file_range(self, path: str, offset: int, num_bytes: int) -> tuple[bytes, int]:
        """Return a range and the file's length. Raises NotServed."""


class ServedFile:
    """A file of the data folder, read in ranges; read from elsewhere once it is no longer there."""

    def __init__(self, job: Ranges, path: str, elsewhere: Callable[[], RangeFile]) -> None:
        """Request the file's length. `elsewhere` opens the file once it has moved. Raises ReaderError."""
        self._job, self._path, self._elsewhere = job, path, elsewhere
        self.num_bytes = job.file_range(path, 0, 1)[1]

    @cached_property
    def _moved(self) -> RangeFile:
        return self._elsewhere()

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Fetch a range. Raises EOFError, ReaderError."""
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise EOFError(f"the file ends at byte {self.num_bytes}, the read at byte {offset + num_bytes}")
        if "_moved" in self.__dict__:
            return self._moved.read(offset, num_bytes)
        try:
            content = self._job.file_range(self._path, offset, num_bytes)[0] if num_bytes else b""
        except NotServed:
            return self._moved.read(offset, num_bytes)
        if len(content) != num_bytes:
            raise ReaderError(f"{self._path}: the service sent {len(content)} bytes of {num_bytes}")
        return np.frombuffer(bytearray(content), np.uint8)

    def arrow(self) -> Any:  # noqa: ANN401 - pyarrow is untyped
        """Return a file object that reads ranges."""
        return arrow_file(self, BUFFER_BYTES)
