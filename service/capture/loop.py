"""The capture loop of one worker process: leases units, keeps the engine full, commits what they become.

Several units are held at once, so that one's verification and commit overlap the next one's forward passes:
a unit whose rows the engine has answered makes room for another at once.
A unit whose lease was lost is abandoned; its successor elsewhere has another epoch and another folder.
"""

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from schemas.job import ENDED_JOB_STATES, JobState
from schemas.receipts import UnitKey
from service.capture.budget import InFlight
from service.capture.landing import land_unit
from service.capture.running import EngineHouse, Running, warm_imports
from service.errors import STORE_AWAY, EngineDied, EngineStuck, LeaseLost, QuarryError, StatesWrong
from service.settings import Settings
from service.store import Store, UnitCommit, UnitLease

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_BEAT_S = 5.0
"""A cancelled job is noticed by its units' next beat."""


class Capture:
    """Runs until `stop` is set, or until job `only_job` needs no more capture."""

    def __init__(self, store: Store, settings: Settings, owner: str, *, only_job: str | None = None) -> None:
        """Hold nothing until `run`."""
        self._store, self._settings, self._owner, self._only_job = store, settings, owner, only_job
        self._house = EngineHouse(settings)
        # Proofs may fill the threads of the loop's own pool for longer than a lease.
        self._heart = ThreadPoolExecutor(1, "quarry-heart")
        self._budget = InFlight(settings.in_flight_tokens, settings.in_flight_requests)
        self._runs: dict[UnitKey, asyncio.Task[None]] = {}
        self._feeding: set[UnitKey] = set()
        """Those of the runs whose rows the engine has not all answered."""
        self._held: dict[UnitKey, UnitLease] = {}
        self._job: str | None = None
        self._distrusted = False
        """Whether the running engine gave wrong states, which its prefix cache may hold and give again, or is
        stuck. Nothing that it captured is committed any more, and the next unit gets another.
        """
        self.stop = asyncio.Event()
        self._room = asyncio.Event()
        """Set when a unit ends, or no longer needs the engine."""

    async def run(self) -> None:
        """Serve units until stopped.

        Then let those in the engine end, give the others back, and stop the engine.
        """
        heart = asyncio.create_task(self._beat())
        try:
            while not self.stop.is_set() and not await self._finished():
                if heart.done():
                    # Without a heartbeat every lease is lost in a while: better to end now, and loudly.
                    heart.result()
                if not await self._serve_one():
                    await self._pause()
            await self._drain()
        finally:
            heart.cancel()
            try:
                await self._give_back()
                await asyncio.gather(heart, return_exceptions=True)
            finally:
                self._heart.shutdown(wait=False)
                await self._house.stop()

    async def _finished(self) -> bool:
        if self._only_job is None or self._runs:
            return False
        try:
            job = await asyncio.to_thread(self._store.summary, self._only_job)
        except STORE_AWAY as error:
            logger.warning("job %s cannot be looked at: %s", self._only_job, error)
            return False
        if job.state in ENDED_JOB_STATES or job.state in {JobState.PUBLISHING, JobState.BLOCKED}:
            return True
        return job.progress.plan_done and job.progress.units_done == job.progress.units_planned

    async def _serve_one(self) -> bool:
        """Lease and start one unit if there is room; return whether there was one."""
        most = self._settings.units_in_flight
        if len(self._feeding) >= most or len(self._runs) >= most + self._settings.units_in_proof:
            return False
        try:
            lease = await asyncio.to_thread(
                self._store.lease_unit, self._owner, self._settings.lease_s, prefer_job=self._job
            )
        except STORE_AWAY as error:
            logger.warning("no unit can be leased: %s", error)
            return False
        if lease is None:
            return False
        self._held[lease.key] = lease
        running = await self._unless_stopped(self._supervised(lease, self._engine_for(lease)))
        # By then the lease may be lost.
        if running is not None and lease.key in self._held and not self.stop.is_set():
            self._job = lease.key.job_id
            self._feeding.add(lease.key)
            task = asyncio.create_task(self._run_unit(lease, running))
            self._runs[lease.key] = task
            task.add_done_callback(lambda _: self._ended(lease.key))
        return True

    def _ended(self, key: UnitKey) -> None:
        self._runs.pop(key, None)
        self._answered(key)

    def _answered(self, key: UnitKey) -> None:
        self._feeding.discard(key)
        self._room.set()

    async def _engine_for(self, lease: UnitLease) -> Running:
        """Return an engine that serves the lease's job; units of the old one end first.

        Runs a new job's canary.
        """
        spec = await self._house.inspect(lease)
        running = self._house.running
        fits = running is not None and not self._distrusted and running.serves(spec)
        if running is not None and fits and lease.key.job_id == self._job:
            return running
        # Torch and the engine are imported beside the worker's start, which does not wait for them.
        await asyncio.to_thread(warm_imports, self._settings)
        from service.capture.canary_run import ensure_canary
        from service.capture.reference_ahead import ReferenceAhead

        async with ReferenceAhead(lease, self._store, self._settings) as ahead:
            if running is None or not fits:
                if self._runs:
                    await asyncio.wait(self._runs.values())
                logger.info("starting the engine for %s", lease.request.model)
                running = await self._house.switch(spec, ahead.begin)
                self._distrusted = False
            if lease.key.job_id != self._job:
                await ensure_canary(running, lease, self._store, self._settings, ahead)
        return running

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` returns; none if the worker is told to stop before, which ends the work."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _run_unit(self, lease: UnitLease, running: Running) -> None:
        from service.capture.unit_run import UnitRun

        run = UnitRun(
            lease, running, self._budget, self._settings, on_answered=lambda: self._answered(lease.key)
        )
        commit = await self._supervised(lease, run.run())
        if commit is not None:
            await self._supervised(lease, self._commit(lease, commit))

    async def _commit(self, lease: UnitLease, commit: UnitCommit) -> None:
        # Another engine is started when all units of this one have ended, and only then trusted anew.
        if self._distrusted:
            raise EngineDied("another unit of this engine got wrong states, or none: this one runs again")
        await asyncio.to_thread(self._store.commit_unit, commit, self._owner)
        self._held.pop(lease.key, None)
        await asyncio.to_thread(land_unit, self._settings, commit)

    async def _supervised(self, lease: UnitLease, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` returns; whatever it raises ends the attempt, and nothing else."""
        try:
            return await work
        except LeaseLost as error:
            logger.info("unit %s: %s", lease.key, error)
            self._held.pop(lease.key, None)
        except QuarryError as error:
            await self._fail(lease, error)
        except Exception as error:
            # Supervisor: a unit that ended without a word would keep its lease for as long as this process
            # beats.
            logger.exception("unit %s", lease.key)
            await self._fail(lease, QuarryError(f"internal error: {error!r}"))
        return None

    async def _fail(self, lease: UnitLease, error: QuarryError) -> None:
        """Record why an attempt ended; the error's class decides what becomes of the unit and the job."""
        # Before anything is waited for: units that run beside this one look at it before they commit.
        self._distrusted |= isinstance(error, StatesWrong | EngineStuck)
        self._held.pop(lease.key, None)
        problem = error.problem()
        logger.warning("unit %s failed: %s", lease.key, problem.detail)
        try:
            await asyncio.to_thread(
                self._store.fail_unit,
                lease.key,
                self._owner,
                problem,
                error.outcome,
                self._settings.unit_attempts,
            )
        except (LeaseLost, *STORE_AWAY) as lost:
            # Nothing can be recorded: the lease runs out, and the unit's next attempt meets the error again
            # or not.
            logger.info("unit %s: %s", lease.key, lost)
        if isinstance(error, EngineDied):
            self._job = None
            if self._house.running is not None and not self._house.running.alive:
                await self._house.stop()

    async def _beat(self) -> None:
        """Keep the leases; cancel the units that were lost."""
        while True:
            await asyncio.sleep(min(self._settings.lease_s / 4, LONGEST_BEAT_S))
            keys = list(self._held)
            if not keys:
                continue
            try:
                lost = await asyncio.get_running_loop().run_in_executor(
                    self._heart, self._store.extend_units, keys, self._owner, self._settings.lease_s
                )
            except STORE_AWAY as error:
                # The leases live on for three more beats; if the store does not come back, they expire.
                logger.warning("leases could not be extended: %s", error)
                continue
            for key in lost:
                self._held.pop(key, None)
                if task := self._runs.get(key):
                    task.cancel()

    async def _pause(self) -> None:
        """Wait for room for a unit, for `stop`, or for the next look at the store."""
        waiting = {asyncio.create_task(event.wait()) for event in (self.stop, self._room)}
        try:
            await asyncio.wait(waiting, timeout=self._settings.poll_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._room.clear()
            for task in waiting:
                task.cancel()

    async def _drain(self) -> None:
        if self._runs:
            await asyncio.wait(self._runs.values(), timeout=self._settings.drain_s)

    async def _give_back(self) -> None:
        """Cancel what still runs and return its leases, so that nobody waits for them to expire."""
        tasks = list(self._runs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key in list(self._held):
            del self._held[key]
            try:
                await asyncio.to_thread(self._store.release_unit, key, self._owner)
            except (LeaseLost, *STORE_AWAY) as error:
                logger.info("unit %s: %s", key, error)
