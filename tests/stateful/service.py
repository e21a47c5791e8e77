"""One service that a test plays with: its database, a worker that lives on, and the roles beside it.

A rule runs a role to a chosen transaction, so that what users and fate do falls between any two of them,
and a sequence that failed fails again.
"""

import asyncio
import logging
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import text

from schemas.job import RESTING_JOB_STATES, JobState
from service.control.scheduling import submit_due
from service.errors import StoreUnavailable
from service.settings import Settings
from service.store import JobRow, Store, Transaction, jobs, migration
from tests.support.roles import Capture, delete_old, run_planning, run_publishing, sweep
from tests.support.store_cases import Clock

AWAY = StoreUnavailable("away")
WORK_S = 60.0
"""After which a worker that neither works nor rests is stuck."""
REFUSALS = 3
"""Refused transactions in a row say that a worker has nothing in hand but what waits for the database."""
LOOKS = 12
"""Transactions without a lease before and after say that it finds nothing to lease."""
ROUNDS = 40
LONGEST_STEP_S = 6 * 3600.0


class LoggedErrors(logging.Handler):
    """Keeps what is logged as an error: a bug that a supervisor has met."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(logging.Formatter().format(record))


class WatchedStore(Store):
    """A store that calls `before` and `after` around each of its transactions."""

    def __init__(
        self,
        url: str,
        clock: str,
        before: Callable[[bool], None] = lambda writes: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is told whether the transaction may write; what it raises is raised to the caller."""
        super().__init__(url, clock)
        self._before, self._after = before, after

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        self._before(False)
        with super().reading() as tx:
            yield tx
        self._after()

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        self._before(True)
        with super().writing() as tx:
            yield tx
        self._after()


class Worker:
    """A capture loop on a thread of its own. Its database is away whenever no rule lets it work."""

    def __init__(self, settings: Settings, clock: Clock, name: str) -> None:
        self.name = name
        self._settings = settings
        self._lock = threading.Lock()
        self._count = self._refused = 0
        self._open = False
        self._end_at: int | None = None
        self._meanwhile: Callable[[], None] | None = None
        self._error: BaseException | None = None
        url = settings.database()
        self.store = WatchedStore(url, clock.of(url), self._before)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._capture = Capture(self.store, self._settings, self.name)
            self._ready.set()
            await self._capture.run()

        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - raised by `check`
            self._error = error

    def _before(self, writes: bool) -> None:
        with self._lock:
            if not self._open:
                self._refused += 1
                raise AWAY
            self._count += 1
            ends = self._count == self._end_at
            self._open = not ends or self._meanwhile is not None
        if ends and self._meanwhile is None:
            raise AWAY
        if ends:
            self._meanwhile()

    def work(
        self, store: Store, limit: int | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Let it work until nothing is left, or its database goes away at transaction `limit`.

        With `meanwhile`, that is called before this transaction instead, and may raise into it.
        """
        with self._lock:
            self._end_at = None if limit is None else self._count + limit
            self._open, self._meanwhile = True, meanwhile
        deadline = time.monotonic() + WORK_S
        try:
            while not self._is_quiet(store):
                self.check()
                assert time.monotonic() < deadline, f"{self.name} neither works nor rests"
                time.sleep(0.01)
        finally:
            with self._lock:
                self._open = False
        self.check()

    def _is_quiet(self, store: Store) -> bool:
        with self._lock:
            if not self._open and self._refused >= REFUSALS:
                return True
            if self._open:
                self._refused = 0
            count = self._count
        if leased(store, self.name):
            return False
        deadline = time.monotonic() + WORK_S
        while time.monotonic() < deadline and self._thread.is_alive():
            with self._lock:
                if not self._open:
                    return False
                if self._count >= count + LOOKS:
                    return not leased(store, self.name)
            time.sleep(0.005)
        return False

    def check(self) -> None:
        """Raise what ended the loop."""
        if self._error is not None:
            raise AssertionError("the capture loop ended with an error") from self._error
        assert self._thread.is_alive(), "the capture loop ended"

    def end(self, *, in_order: bool) -> None:
        """Ask it to end; else its database never comes again, and its leases run out as after a kill."""
        with self._lock:
            self._end_at, self._open = None, in_order
        self._loop.call_soon_threadsafe(self._capture.stop.set)
        self._thread.join(WORK_S)
        assert not self._thread.is_alive(), f"{self.name} does not end"
        if self._error is not None:
            raise AssertionError("the capture loop ended with an error") from self._error
        self.store.close()


def leased(store: Store, owner: str | None = None) -> list[str]:
    """Return what is leased, to one owner if one is given."""
    query = "SELECT kind, job_id, item, owner FROM task WHERE state = 'leased'"
    with store.reading() as tx:
        rows = tx.connection.execute(text(query)).all()
    return [f"{row.kind} {row.job_id} {row.item} {row.owner}" for row in rows if owner in {None, row.owner}]


Role = Callable[[Store], None]


@dataclass
class Service:
    """Everything that shares one database and one data folder."""

    settings: Settings
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.settings.data_dir.mkdir(parents=True, exist_ok=True)
        url = self.settings.database()
        self.store = Store(url, self.clock.of(url))
        self.store.write(migration.migrate)
        self._workers = 0
        self._worker: Worker | None = None
        self._deaths = 0

    def close(self) -> None:
        if self._worker is not None:
            self._worker.end(in_order=True)
        self.store.close()

    @property
    def worker(self) -> Worker:
        """The worker, which begins with its first use."""
        if self._worker is None:
            self._workers += 1
            self._worker = Worker(self.settings, self.clock, f"worker-{self._workers}")
        return self._worker

    def end_worker(self, *, in_order: bool) -> None:
        """End the worker; another begins with the next use."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.end(in_order=in_order)

    def roles(self) -> dict[str, Role]:
        """Return what runs beside the worker, each until it has nothing to do."""

        def plan(store: Store) -> None:
            while run_planning(store, self.settings, "planner", lambda: False):
                pass

        def publish(store: Store) -> None:
            while run_publishing(store, self.settings, "publisher", lambda: False):
                pass

        return {
            "plan": plan,
            "publish": publish,
            "sweep": lambda store: void(sweep(store, self.settings)),
            "slots": lambda store: void(submit_due(store, self.settings)),
            "retention": lambda store: delete_old(store, self.settings),
        }

    def capture_elsewhere(self, store: Store) -> None:
        """Capture with another worker, as long as it takes: for a process that is killed on the way."""
        self._workers += 1
        asyncio.run(asyncio.wait_for(Capture(store, self.settings, f"process-{self._workers}").run(), WORK_S))

    def run(self, role: Role, at: int | None = None, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run a role; `meanwhile` is called before its transaction `at`, and may raise into it."""
        if at is None:
            role(self.store)
            return
        count, lock = 0, threading.Lock()

        def before(writes: bool) -> None:
            nonlocal count
            with lock:
                count += 1
                now = count == at
            if now:
                meanwhile()

        url = self.settings.database()
        store = WatchedStore(url, self.clock.of(url), before)
        try:
            role(store)
        finally:
            store.close()

    def die(self, role: Role, at: int, *, committed: bool) -> None:
        """Run a role in a process that is killed at its transaction `at`, before or after its commit.

        Raises AssertionError if the process ends with an error of its own before that.
        """
        self._deaths += 1
        said = Path(self.settings.data_dir) / f"process-{self._deaths}.txt"
        pid = os.fork()
        if pid == 0:
            self._live(role, at, committed, said)
        watch = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([watch], [], [], WORK_S / 2)
        finally:
            os.close(watch)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            # A fork of a process with threads may wait for one that it has not: a kill like any other.
        _, status = os.waitpid(pid, 0)
        assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, said.read_text()

    def _live(self, role: Role, at: int, committed: bool, said: Path) -> None:
        """Be the process; never returns."""
        count = 0

        def before(writes: bool) -> None:
            nonlocal count
            count += 1
            if count == at and not committed:
                os.kill(os.getpid(), signal.SIGKILL)

        def after() -> None:
            if count >= at and committed:
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            url = self.settings.database()
            role(WatchedStore(url, self.clock.of(url), before, after))
            code = 0
        except BaseException:  # noqa: BLE001 - raised in the parent
            said.write_text(traceback.format_exc())
        finally:
            os._exit(code)

    def jobs(self) -> list[JobRow]:
        """Return all jobs, oldest first."""
        return self.store.read(jobs.page, limit=200)[0][::-1]

    def settle(self, noticed: Callable[[], None]) -> None:
        """Work until every job rests and nothing is leased; time passes where nothing moves otherwise.

        `noticed` is called after each look at the slots.
        """
        step_s, seen = 61.0, None
        for _ in range(ROUNDS):
            roles = self.roles()
            roles["slots"](self.store)
            noticed()
            roles["plan"](self.store)
            if any(job.state not in RESTING_JOB_STATES for job in self.jobs()):
                self.worker.work(self.store)
            roles["publish"](self.store)
            states = [(job.id, job.state, job.progress) for job in self.jobs()]
            held = leased(self.store)
            if held or any(job.state is JobState.DELETING for job in self.jobs()):
                roles["sweep"](self.store)
                roles["retention"](self.store)
            elif all(state in RESTING_JOB_STATES for _, state, _ in states):
                return
            if states == seen:
                self.clock.advance(step_s)
                step_s = min(2 * step_s, LONGEST_STEP_S)
            seen = states
        raise AssertionError(f"does not settle: {seen}, leased: {leased(self.store)}")


def void(value: Any) -> None:
    """Take a value that nobody asks for."""
