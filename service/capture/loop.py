"""The capture loop of one worker process: leases units, keeps the engine full, commits the results.

Several units are held at once, so that one unit's verification and commit overlap the next one's forward
passes: a unit makes room for another as soon as the engine has answered its rows. A unit whose lease was lost
is abandoned; its successor elsewhere has another epoch and another folder.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from schemas.job import RESTING_JOB_STATES, JobState
from schemas.receipts import AttemptId
from schemas.worker import Role
from service.capture import scratch
from service.capture.attempt_files import land_unit
from service.capture.charging import charge, is_the_workers, refuse_other_engine
from service.capture.held import HeldUnit
from service.capture.imports import import_engine
from service.capture.interruption import unless
from service.capture.renderer import Renderers
from service.capture.session import EngineSession, EngineSlot
from service.capture.status import status
from service.errors import (
    STORE_AWAY,
    EngineChanged,
    EngineDied,
    EngineRefused,
    EngineStuck,
    NotFound,
    Outcome,
    QuarryError,
    StatesNotFinite,
    StatesWrong,
    StoreUnavailable,
    writing,
)
from service.host import host_of
from service.settings import Settings
from service.store import HOME, Store, UnitCommit, UnitLease, commits, jobs, tasks, units, workers
from service.store.workers import GAP_S
from service.work.keeper import BEATS, Keeper
from service.work.meters import COMMITTED, REJECTED, WAITS
from service.work.runner import attempt, record

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Capture:
    """Runs until `stop` is set, or until job `only_job` needs no more capture."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        owner: str,
        keeper: Keeper,
        *,
        only_job: str | None = None,
    ) -> None:
        self._store, self._settings, self._owner, self._only_job = store, settings, owner, only_job
        self._keeper = keeper
        self._captures = Role.CAPTURE in settings.roles
        self._engine = EngineSlot(settings)
        self._renderers = Renderers(store, settings)
        self._units: dict[AttemptId, HeldUnit] = {}
        self._host: int | None = None
        """The number of this worker's host, once it was read from the store."""
        self._waits: str | None = None
        """Why no units are leased of jobs whose local shards are removed once stored; None if they are."""
        self._last_job: str | None = None
        """The job of the unit leased last: the next unit of the same job needs no other engine."""
        self.rested = False
        """Whether this worker ended while it refused units of a model on which its engine dies."""
        self._thread = ThreadPoolExecutor(1, "capture")
        """For heartbeats and giving back: proofs on a slow disk may hold all of the loop's own threads."""
        self.stop = asyncio.Event()
        self._at_once = asyncio.Event()
        self._room = asyncio.Event()
        """Set when a unit ends, or no longer needs the engine."""
        self._news = asyncio.Event()
        """Set when the worker's row is out of date."""

    def stop_at_once(self) -> None:
        """Stop without draining: also give back the units that are in the engine."""
        self.stop.set()
        self._at_once.set()

    async def run(self) -> None:
        """Serve units until stopped. Without the capture role, only wait; return at once for a single job.

        Then let the running units finish within `drain_s`, give the others back, and stop the engine.
        """
        ended = asyncio.Event()
        beating = asyncio.create_task(self._beat(ended))
        try:
            if not self._captures and self._only_job is None:
                await self.stop.wait()
            while self._captures and not self.stop.is_set() and not await self._finished():
                # Without a keeper every lease is lost sooner or later: better to fail now, and loudly.
                self._keeper.check()
                if not await self._serve_one():
                    await self._pause()
            WAITS.enter("stop")
            if running := self._tasks():
                drained = asyncio.wait(running, timeout=self._settings.drain_s)
                await unless(drained, self._at_once.wait())
        finally:
            ended.set()
            try:
                await beating
            finally:
                try:
                    await self._give_back()
                finally:
                    self._thread.shutdown(wait=False)
                    await self._engine.stop()

    async def _beat(self, ended: asyncio.Event) -> None:
        """Record this worker's heartbeat until `ended`, or only its host's if it does not capture."""
        while not ended.is_set():
            try:
                leases = [unit.lease for unit in self._units.values()]
                host = await self._known_host()
                beat = partial(
                    workers.beat,
                    owner=self._owner,
                    ttl_s=self._settings.lease_s,
                    host=host,
                    status=status(self._settings, self._engine.session, leases),
                    waits=self._waits,
                )
                said = beat if self._captures else partial(workers.seen, host=host)
                await self._in_own_thread(self._store.write, said)
            except STORE_AWAY as error:
                logger.warning("the worker's row cannot be written: %s", error)
            pause_s = min(self._settings.lease_s, GAP_S) / BEATS
            await unless(asyncio.sleep(pause_s), ended.wait(), self._news.wait())
            self._news.clear()

    async def _known_host(self) -> int:
        """Return the number of this worker's host. Raises what `host_of` raises."""
        if self._host is None:
            self._host = await self._in_own_thread(host_of, self._store, self._settings)
        return self._host

    async def _in_own_thread(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [unit.task for unit in self._units.values() if unit.task is not None]

    async def _finished(self) -> bool:
        if self._only_job is None or self._units:
            return False
        try:
            job = await asyncio.to_thread(self._store.read, jobs.job, self._only_job)
        except STORE_AWAY as error:
            logger.warning("job %s cannot be looked at: %s", self._only_job, error)
            return False
        except NotFound:
            return True  # it was deleted
        if job.state in RESTING_JOB_STATES or job.state is JobState.PUBLISHING:
            return True
        return job.progress.is_captured

    async def _serve_one(self) -> bool:
        """Lease and start one unit if there is room; return whether one was leased."""
        in_engine = sum(unit.needs_engine for unit in self._units.values())
        limit = self._settings.units_in_flight
        if in_engine >= limit or len(self._units) >= limit + self._settings.units_in_proof:
            WAITS.enter("engine" if in_engine >= limit else "proof")
            return False
        if any(unit.alone for unit in self._units.values()):
            WAITS.enter("alone")
            return False
        try:
            leases = [unit.lease for unit in self._units.values()]
            host = await self._known_host()
            self._waits = await asyncio.to_thread(scratch.full, self._store, self._settings, leases, host)
            lease = await asyncio.to_thread(
                units.lease,
                self._store,
                self._owner,
                self._settings.lease_s,
                prefer_job=self._last_job,
                is_full=self._waits is not None,
                host=host,
            )
        except STORE_AWAY as error:
            logger.warning("no unit can be leased: %s", error)
            WAITS.enter("database")
            return False
        if lease is None:
            WAITS.enter("work" if self._waits is None else "disk")
            return False
        WAITS.enter("none")
        unit, self._last_job = self._keep(lease), lease.job_id
        preparing = self._supervised(unit, self._engine_for(unit))
        session = await unless(preparing, self.stop.wait(), unit.lost.wait())
        if self.stop.is_set():
            return True
        if session is None or not unit.leased:
            self._ended(unit)
            return True
        unit.session = session
        unit.task = asyncio.create_task(self._run_unit(unit, session))
        unit.task.add_done_callback(lambda _: self._ended(unit))
        return True

    def _keep(self, lease: UnitLease) -> HeldUnit:
        """Keep a lease from now on; a unit that is lost is cancelled."""
        unit = self._units[lease.attempt_id] = HeldUnit(lease)
        unit.alone = lease.runs_alone
        loop = asyncio.get_running_loop()

        def on_lost() -> None:
            loop.call_soon_threadsafe(self._lost, unit)

        unit.keeping.enter_context(self._keeper.keep(lease, on_lost))
        return unit

    def _lost(self, unit: HeldUnit) -> None:
        unit.lost.set()
        if unit.leased and unit.task is not None and not unit.commits:
            unit.task.cancel()
        self._let_go(unit)

    def _let_go(self, unit: HeldUnit) -> None:
        unit.leased = False
        unit.keeping.close()

    def _ended(self, unit: HeldUnit) -> None:
        self._units.pop(unit.lease.attempt_id, None)
        self._renderers.keep({other.lease.job_id for other in self._units.values()})
        unit.keeping.close()
        self._room.set()

    def _answered(self, unit: HeldUnit) -> None:
        unit.needs_engine = False
        self._room.set()

    async def _engine_for(self, unit: HeldUnit) -> EngineSession:
        """Return an engine that serves the unit's job, once its canary has passed.

        A unit that runs alone waits for all others. If another engine is needed, the units of the old one
        finish first.
        """
        if unit.alone and (running := self._tasks()):
            await asyncio.wait(running)
        session, lease = self._engine.session, unit.lease
        if session is not None:
            session.charged = session.charged and bool(self._tasks())
            refuse_other_engine(lease, session)
        if session is not None and session.serves(lease.identity) and (session.canary or lease.skips_canary):
            return session
        # The worker's start does not wait for the import of torch and the engine.
        await asyncio.to_thread(import_engine, self._settings)
        from service.capture.canary import Canary

        async with Canary(lease, self._store, self._settings) as canary:
            inspect = partial(self._engine.inspect, lease)
            if session is None or not session.serves(lease.identity):
                WAITS.enter("start")
                if running := self._tasks():
                    await asyncio.wait(running)
                spec = await inspect()
                logger.info("starting the engine for %s", lease.model)
                head = await self._engine.prepare(spec)
                await canary.begin_early(spec, head)
                self._news.set()
                session = await self._engine.start(lease, spec, head)
                self._news.set()
                refuse_other_engine(lease, session)
            try:
                if not await canary.has_passed(session):
                    spec = await inspect()
                    unit.on_trial = session
                    await canary.run(session, spec)
            except (StatesWrong, EngineRefused):
                await self._engine.check_unchanged(lease)  # the reference may have read another model
                raise
        return session

    async def _run_unit(self, unit: HeldUnit, session: EngineSession) -> None:
        from service.capture.unit_run import UnitRun

        on_answered = partial(self._answered, unit)
        run = UnitRun(unit.lease, session, on_answered, self._renderers, self._store)
        commit = await self._supervised(unit, run.run())
        if commit is not None:
            await self._supervised(unit, self._commit(unit, session, commit))

    async def _commit(self, unit: HeldUnit, session: EngineSession, commit: UnitCommit) -> None:
        """Commit a proven unit, and move its files into the data folder if that is here.

        Retries while the store is unavailable, unless this worker is stopping. After a commit whose answer
        was lost, the next try raises LeaseLost; a sweep then moves its files.
        """
        # The keeper may find that the lease is gone because the commit ended it: the files must still be
        # moved.
        unit.commits = True
        while True:
            session.check_trusted()
            try:
                await asyncio.to_thread(self._store.write, commits.commit, commit, unit.lease)
                break
            except StoreUnavailable as error:
                if self.stop.is_set():
                    raise
                logger.warning("unit %s cannot be committed yet: %s", commit.attempt_id, error)
            await asyncio.sleep(self._settings.poll_s)
        session.has_captured = True
        COMMITTED.add_shards(commit.shards, units=1)
        REJECTED.add(samples=len(commit.rejects))
        self._let_go(unit)
        if unit.lease.host != HOME:
            return  # that host uploads them to the repository
        with writing(f"the files of unit {commit.attempt_id.unit}"):
            await asyncio.to_thread(land_unit, self._store, self._settings, commit)

    async def _supervised(self, unit: HeldUnit, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` returns; whatever it raises ends the attempt, and nothing else."""
        with attempt(f"unit {unit.lease.attempt_id}", **unit.lease.named()) as end:
            return await work
        if end.error is not None:
            await self._fail(unit, end.error)
        else:
            self._let_go(unit)
        return None

    async def _fail(self, unit: HeldUnit, error: QuarryError) -> None:
        """Record why an attempt ended; the error's class decides what becomes of the unit and the job.

        The death of an engine is counted once; that of one which never served the unit says nothing of the
        engine that is there.
        """
        session = unit.session or unit.on_trial
        if session is not None and isinstance(error, StatesWrong | EngineStuck | StatesNotFinite):
            # Before any await: other units on this engine check it before they commit.
            session.trusted = False
        lease, problem = unit.lease, error.problem()
        is_workers = is_the_workers(unit, error)
        if isinstance(error, EngineChanged | EngineRefused):
            fail = partial(self._store.write, workers.pass_on, lease, error, self._settings.engine_rest_s)
        elif not is_workers:
            attempts = self._settings.unit_attempts, self._settings.publish_attempts
            fail = partial(self._store.write, workers.failed, lease, error, *attempts)
        elif session is not None and session.charged:
            fail = partial(self._store.write, tasks.fail, lease, problem, Outcome.VOID, max_attempts=1)
        else:
            fail = partial(charge, self._store, self._settings, unit, error)
        if session is not None and is_workers:
            session.charged = True
            session.spent = session.spent or isinstance(error, EngineDied | StatesWrong)  # not for a disk
        if unit.leased and await asyncio.to_thread(record, fail, self.stop.is_set):
            self._let_go(unit)  # otherwise it is given back later
        if isinstance(error, EngineDied) and session is not None and not session.alive:
            await self._engine.stop()

    async def _pause(self) -> None:
        """Wait until there is room for a unit, `stop` is set, or it is time to poll the store."""
        await unless(asyncio.sleep(self._settings.poll_s), self.stop.wait(), self._room.wait())
        self._room.clear()

    async def _give_back(self) -> None:
        """Cancel what is still running and release its leases, so that nobody waits for them to expire."""
        held, running = list(self._units.values()), self._tasks()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for unit in held:
            self._let_go(unit)
        try:
            await self._in_own_thread(self._store.write, tasks.release_owner, self._owner)
            self.rested = await self._in_own_thread(self._store.write, workers.leave, self._owner)
        except STORE_AWAY as error:
            logger.warning("the units run out: %s", error)
