"""The workers that capture: which of them are there, what their engines die over, and whose fault that is."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import delete, select, update

from service.errors import EngineDied, Outcome
from service.store import tasks
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.tables import TASK, WORKER
from service.store.values import EngineHealth, LoneDeath, LoneDeaths, UnitLease, WorkerHealth

LONE_DEATHS = 3
"""Of engines, on a unit that ran alone, another one proven between each: then the unit is at fault."""
LOOK = "look in the engine's log"
GONE = 10
"""Of the times of a beat, after which a silent worker's row is removed. After one it counts no more."""


class WorkerRow(NamedTuple):
    """A worker that is there, as it said last."""

    owner: str
    host: str
    pid: int
    health: WorkerHealth

    def resting(self) -> tuple[EngineHealth, ...]:
        """Return the models of which it takes no unit."""
        return tuple(engine for engine in self.health.engines if engine.rest_s > 0)


def beat(tx: Transaction, owner: str, engines: Sequence[EngineHealth], ttl_s: float) -> None:
    """Say that this process is there, and for `ttl_s` from now; remove workers that are long gone."""
    check_write(tx)
    values = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "health": WorkerHealth(engines=tuple(engines)),
        "seen_at": tx.now,
        "alive_until": tx.now + timedelta(seconds=ttl_s),
    }
    new = tx.insert(WORKER).values(owner=owner, **values)
    tx.connection.execute(new.on_conflict_do_update(index_elements=["owner"], set_=values))
    tx.connection.execute(
        delete(WORKER).where(WORKER.c.alive_until <= tx.now - timedelta(seconds=GONE * ttl_s))
    )


def leave(tx: Transaction, owner: str) -> None:
    """Remove a worker that ends."""
    check_write(tx)
    tx.connection.execute(delete(WORKER).where(WORKER.c.owner == owner))


def present(tx: Transaction) -> list[WorkerRow]:
    """Return the workers that are there."""
    columns = [WORKER.c[name] for name in WorkerRow._fields]
    query = select(*columns).where(WORKER.c.alive_until > tx.clock).order_by(WORKER.c.owner)
    return [WorkerRow(*row) for row in tx.connection.execute(query)]


def waits(tx: Transaction) -> dict[str, str]:
    """Say of each model that a worker rests from, why."""
    said: dict[str, list[str]] = {}
    for worker in present(tx):
        for engine in worker.resting():
            said.setdefault(engine.model, []).append(f"worker {worker.host}'s engine dies: {engine.cause}")
    return {model: "; ".join(dict.fromkeys(causes)) for model, causes in said.items()}


def engine_died(
    tx: Transaction,
    lease: UnitLease,
    error: EngineDied,
    engines: Sequence[EngineHealth],
    death: LoneDeath | None,
) -> None:
    """Give a unit back whose engine died: no attempt is counted. Raises LeaseLost.

    `engines` is what the worker rests from by now, `death` is there if the unit ran alone. The unit fails by
    name if it is at fault. Else its job is blocked if no worker is left that takes its model.
    """
    tasks.held(tx, lease)
    beat(tx, lease.owner, engines, lease.ttl_s)
    deaths = (lease.lone_deaths or LoneDeaths()).deaths
    if death is not None:
        deaths = (*deaths, death)
        task = (TASK.c.job_id == lease.job_id) & (TASK.c.kind == lease.kind) & (TASK.c.item == lease.item)
        tx.connection.execute(update(TASK).where(task).values(lone_deaths=LoneDeaths(deaths=deaths)))
    takers = {
        worker.owner
        for worker in present(tx)
        if lease.model not in {engine.model for engine in worker.resting()}
    }
    outcome = Outcome.VOID
    if death is not None and is_at_fault(deaths, is_only_worker=takers <= {lease.owner}):
        outcome = Outcome.FAIL
        error = type(error)(
            f"engines died on unit {lease.item} {len(deaths)} times when it ran alone, and on no other: "
            f"{error.detail}",
            cure=f"{LOOK} for what it cannot run; submit a new job without those samples",
        )
    elif not takers:
        outcome = Outcome.BLOCK
        error = type(error)(
            f"worker {socket.gethostname()}'s engine dies, and no other worker is there: {error.detail}",
            cure=f"{error.cure or LOOK}; restart the worker, which rests, then resume",
        )
    tasks.fail(tx, lease, error.problem(), outcome, max_attempts=1)


def is_at_fault(deaths: Sequence[LoneDeath], *, is_only_worker: bool) -> bool:
    """Say whether a unit is at fault for the deaths of engines that ran it alone.

    It is if two workers died on it, or the only one there is `LONE_DEATHS` times. What was not sound may have
    been the worker's fault; the only worker's first death cannot be sound.
    """
    sound = [death.worker for death in deaths if death.sound]
    return len(set(sound)) > 1 or (
        is_only_worker and len(sound) >= LONE_DEATHS - 1 and len(deaths) >= LONE_DEATHS
    )
