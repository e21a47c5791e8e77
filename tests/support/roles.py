"""The kinds of work, each with a keeper of its own for one call."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.capture import loop
from service.control.deletion import run_deletion, run_retention
from service.host import run_lost
from service.plan import planner
from service.publish import publisher, storing
from service.settings import Settings
from service.store import Store, jobs, workers
from service.sweeper import run_sweep
from service.work.keeper import Keeper
from service.work.runner import LoopContext
from tests.support.waiting import until

PLANNING = "service.plan.planner:run_planning"
PUBLISHING = "service.publish.publisher:run_publishing"
"""As a worker names them."""


class Capture(loop.Capture):
    """A capture loop whose keeper lives as long as it runs."""

    def __init__(self, store: Store, settings: Settings, owner: str, only_job: str | None = None) -> None:
        super().__init__(store, settings, owner, Keeper(store, settings.lease_s), only_job=only_job)

    async def run(self) -> None:
        with self._keeper:
            await super().run()


def capture_until(is_over: Callable[[], bool], *loops: Capture, at_once: bool = False) -> None:
    """Let capture loops run until something is so, then stop them, with or without draining."""

    async def captured() -> None:
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop.run())
            await until(is_over)
            for loop in loops:
                loop.stop_at_once() if at_once else loop.stop.set()

    asyncio.run(asyncio.wait_for(captured(), 120))


def capture_beside(store: Store, job_id: str, healthy: Settings, sick: Settings) -> None:
    """Capture a job by two workers; the sick one comes once the healthy one is there, so it is not alone."""

    async def both() -> None:
        first, second = Capture(store, healthy, "healthy"), Capture(store, sick, "sick")
        running = [asyncio.create_task(first.run())]
        await until(lambda: "healthy" in store.read(workers.present))
        running.append(asyncio.create_task(second.run()))
        await until(lambda: store.read(jobs.job, job_id).progress.is_captured)
        first.stop.set()
        second.stop.set()
        await asyncio.gather(*running)

    asyncio.run(asyncio.wait_for(both(), 120))


def run_planning(store: Store, settings: Settings, owner: str, stopped: Callable[[], bool]) -> bool:
    """Plan one job; return whether there was one."""
    with Keeper(store, settings.lease_s) as keeper:
        return planner.run_planning(LoopContext(store, settings, owner, keeper, stopped))


def run_publishing(
    store: Store, settings: Settings, owner: str, stopped: Callable[[], bool], **more: Any
) -> bool:
    """Publish one job; return whether there was one."""
    with Keeper(store, settings.lease_s) as keeper:
        return publisher.run_publishing(LoopContext(store, settings, owner, keeper, stopped), **more)


def run_storing(
    store: Store, settings: Settings, owner: str, stopped: Callable[[], bool], **more: Any
) -> bool:
    """Store the captured units of one job; return whether there were enough of them."""
    with Keeper(store, settings.lease_s) as keeper:
        return storing.run_storing(LoopContext(store, settings, owner, keeper, stopped), **more)


def delete_old(store: Store, settings: Settings) -> None:
    """Delete what is old, and end the deletions that have begun."""
    with Keeper(store, settings.lease_s) as keeper:
        run_retention(LoopContext(store, settings, "retention", keeper))
        while run_deletion(LoopContext(store, settings, "deletion", keeper)):
            pass


def give_up_lost(store: Store, settings: Settings) -> None:
    """Give up the units of hosts that were silent for too long."""
    run_lost(LoopContext(store, settings, "lost-hosts", Keeper(store, settings.lease_s)))


def sweep(store: Store, settings: Settings) -> list[Path]:
    """Sweep every folder once; return the folders of jobs, or of attempts, that are gone."""
    root = settings.work_root
    before = sorted([*root.glob("*"), *root.glob("*/attempts/*")])
    run_sweep(LoopContext(store, settings, "sweeper", Keeper(store, settings.lease_s)))
    gone = [folder for folder in before if not folder.exists()]
    return [folder for folder in gone if not any(parent in gone for parent in folder.parents)]
