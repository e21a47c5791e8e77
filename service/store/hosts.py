"""Hosts: folders that hold captured units until they are stored. A lost host's units are captured again."""

import logging
from collections import Counter
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import case, delete, func, select, update

from schemas.job import JOB_MOVES, JobState
from schemas.worker import HostView, WorkerView
from service.errors import NotFound, OptionRefused, StoreUnavailable
from service.store import jobs, storing, totals, workers
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.policies import POLICIES
from service.store.stopping import UNLEASED, stop
from service.store.tables import HOST, JOB, REJECT, SHARD, TASK, TOKEN_COUNTS, UNIT, UNIT_COMMIT, WORKER
from service.store.transitions import LockedJob, count, lock_job, record
from service.store.values import HOME, TaskKind, TaskState

logger = logging.getLogger(__name__)

OVER = frozenset({JobState.COMPLETED, JobState.DELETING})
"""Job states in which nothing is captured again."""
NOWHERE = -1
"""The host of units that are only in their repository, since their data folder was given up."""
BACK_S = 300.0
"""How long other hosts have to come back after the data folder's host or the database was away."""


def number(tx: Transaction, host_id: str) -> int | None:
    """Return the number of the host with an id, or None if it is new."""
    found: int | None = tx.connection.scalar(select(HOST.c.number).where(HOST.c.id == host_id))
    return found


def register(tx: Transaction, host_id: str, name: str, *, is_home: bool) -> int:
    """Return the number of the host with an id, assigning one if it is new; HOME for the data folder.

    Raises OptionRefused for a second data folder of one database, StoreUnavailable if there is none yet.
    """
    check_write(tx)
    known_home = select(HOST.c.id).where(HOST.c.number == HOME, HOST.c.id.is_not(None))
    if not is_home and tx.connection.scalar(known_home) is None:
        # This may be the wrong database, or the data folder itself, which would be registered as scratch for
        # good.
        detail = "the database knows no data folder: `quarry serve` has not started on it yet"
        raise StoreUnavailable(f"{detail}, or QUARRY_DATABASE_URL names another one")
    values = {"id": host_id, "name": name, "seen_at": tx.now, "there_since": tx.now}
    if number(tx, host_id) is None:
        if is_home:
            # The number of a data folder that was given up is free.
            free = update(HOST).where(HOST.c.number == HOME, HOST.c.id.is_(None))
            tx.connection.execute(free.values(values | {"is_lost": False}))
        new = tx.insert(HOST).values(values | ({"number": HOME} if is_home else {}))
        tx.connection.execute(new.on_conflict_do_nothing())  # another process with this folder was faster
    given = number(tx, host_id)
    if is_home and given != HOME:
        home = tx.connection.execute(select(HOST.c.id, HOST.c.name).where(HOST.c.number == HOME)).first()
        detail = "this folder has been scratch of workers without the data folder"
        cure = "give a new folder"
        if home is not None:
            detail = f"the database's data folder is another one, {home.id} on {home.name}"
            cure = "give that folder, or start workers with `--roles capture,store` here; if it is lost: "
            cure += f"`quarry workers forget {home.id}`"
        raise OptionRefused(detail, field="data_dir", cure=cure)
    assert given is not None, "it was inserted"  # noqa: S101
    return given


def views(tx: Transaction) -> list[HostView]:
    """Return the data folder's host, then every host that has workers or units to store."""
    of_host: dict[int, list[WorkerView]] = {}
    present = select(WORKER).where(WORKER.c.alive_until > tx.clock).order_by(WORKER.c.owner)
    for row in tx.connection.execute(present).mappings():
        view = {"name": row["owner"], **{name: row[name] for name in ("pid", "alive_until", "waits")}}
        of_host.setdefault(row["host"], []).append(WorkerView(**view, **row["status"].model_dump()))
    leaving = select(JOB.c.id).where(JOB.c.publish_subject != JOB.c.id, JOB.c.units_stored < JOB.c.units_done)
    goes_on = JOB.c.state.in_(POLICIES[TaskKind.STORE].job_states)
    held = (
        select(
            UNIT_COMMIT.c.host,
            func.count().label("units_to_store"),
            func.sum(UNIT_COMMIT.c.num_bytes).label("bytes_to_store"),
            func.min(case((goes_on, UNIT_COMMIT.c.committed_at))).label("to_store_since"),
        )
        .join(JOB, JOB.c.id == UNIT_COMMIT.c.job_id)
        .where(~UNIT_COMMIT.c.is_stored, UNIT_COMMIT.c.job_id.in_(leaving))
        .group_by(UNIT_COMMIT.c.host)
    )
    holds = {row.pop("host"): row for row in map(dict, tx.connection.execute(held).mappings())}
    known = select(HOST).where(HOST.c.id.is_not(None), HOST.c.number.in_({HOME, *of_host, *holds}))
    found = []
    for row in tx.connection.execute(known.order_by(HOST.c.number)).mappings().all():
        number, there = row["number"], of_host.get(row["number"], [])
        limit = min(filter(None, (worker.scratch_bytes for worker in there)), default=None)
        found.append(
            HostView(
                **{name: row[name] for name in ("id", "name", "is_lost", "seen_at")},
                **holds.get(number, {"units_to_store": 0, "bytes_to_store": 0}),
                is_home=number == HOME,
                scratch_used_bytes=None if limit is None else storing.unstored(tx, number)[0],
                scratch_limit_bytes=limit,
                workers=tuple(there),
            )
        )
    return found


def silent(tx: Transaction, silence_s: float) -> list[str]:
    """Return the hosts, except the data folder's, that hold units and have not been seen for `silence_s`.

    None are returned until the data folder's host has itself been back for `BACK_S`: the others may have been
    cut off together with it, or with the database.
    """
    since = workers.home_since(tx)
    if since is None or since > tx.now - timedelta(seconds=BACK_S):
        return []
    holds = select(UNIT_COMMIT.c.host).where(~UNIT_COMMIT.c.is_stored)
    late = HOST.c.seen_at <= tx.now - timedelta(seconds=silence_s)
    query = select(HOST.c.id).where(HOST.c.number != HOME, late, HOST.c.number.in_(holds))
    return list(tx.connection.scalars(query.order_by(HOST.c.number)))


def forget(tx: Transaction, host_id: str) -> int:
    """Give up what a host holds, so that its units run again elsewhere; return how many.

    If the host comes back, it is a host like any other. If it is the data folder's, its place becomes free
    for another data folder, and jobs that are not pushed end, since their datasets were only there. A job
    that cannot be read keeps what another host than that holds; this is logged once. Raises NotFound.
    """
    check_write(tx)
    lost = number(tx, host_id)
    if lost is None:
        cure = "`quarry workers list` says which there are"
        raise NotFound(f"there is no host {host_id}", field="host_id", cure=cure)
    was_lost = tx.connection.scalar(select(HOST.c.is_lost).where(HOST.c.number == lost))
    # The indexes of consumed units are only in the data folder.
    is_there_alone = ~UNIT_COMMIT.c.is_stored | (JOB.c.publish_subject == JOB.c.id)
    held = select(UNIT_COMMIT.c.job_id).where(UNIT_COMMIT.c.job_id == JOB.c.id, UNIT_COMMIT.c.host == lost)
    holds = held.where(is_there_alone).exists()
    in_order = select(JOB.c.id).where(holds, JOB.c.state.not_in(OVER)).order_by(JOB.c.number)
    job_ids = tx.connection.scalars(in_order.with_for_update()).all()
    counts = Counter[str]()
    for job_id in job_ids:
        try:
            with tx.connection.begin_nested():
                counts += _run_again(tx, lock_job(tx, job_id), lost)
        except (ValueError, LookupError):
            if lost == HOME:  # its units would be taken for those of the next data folder
                raise
            if not was_lost:
                logger.exception("what host %s holds of job %s cannot run again", host_id, job_id)
    totals.keep(tx, counts)  # locked after the jobs
    if lost == HOME:
        on = select(JOB.c.id).where(JOB.c.state.not_in(OVER))
        stored = UNIT_COMMIT.c.host == HOME, UNIT_COMMIT.c.is_stored, UNIT_COMMIT.c.job_id.in_(on)
        tx.connection.execute(update(UNIT_COMMIT).where(*stored).values(host=NOWHERE))
    # After the jobs, as in a beat; otherwise the two could deadlock.
    gone = {"is_lost": True} | ({"id": None} if lost == HOME else {})
    tx.connection.execute(update(HOST).where(HOST.c.number == lost).values(gone))
    return counts["units_done"]


def _run_again(tx: Transaction, job: LockedJob, host: int) -> Counter[str]:
    """Queue again a job's units that only a lost host held; return what they had added to the counters."""
    held = UNIT_COMMIT.c.job_id == job.id, UNIT_COMMIT.c.host == host, ~UNIT_COMMIT.c.is_stored
    columns = UNIT_COMMIT.c.unit, UNIT_COMMIT.c.num_tokens, UNIT_COMMIT.c.num_bytes
    if not job.is_pushed:
        detail = "its dataset was in a data folder that was given up"
        # A job that has ended reports it when it is resumed.
        for end in [to for to in (JobState.FAILED, JobState.CANCELLED) if to in JOB_MOVES[job.state]][:1]:
            stop(tx, job, end, OptionRefused(detail, cure="submit a new job").problem())
        return Counter()
    lost = tx.connection.execute(select(*columns).where(*held)).all()
    if not lost:
        return Counter()  # stored while this waited for the job
    units = [row.unit for row in lost]
    # Rejects stay, as if the plan had rejected them; the rows that were written are captured again.
    rejected = select(func.count()).where(REJECT.c.job_id == UNIT.c.job_id, REJECT.c.unit == UNIT.c.unit)
    of_units = UNIT.c.job_id == job.id, UNIT.c.unit.in_(units)
    fewer = UNIT.c.num_samples - rejected.scalar_subquery()
    tx.connection.execute(update(UNIT).where(*of_units).values(num_samples=fewer))
    of_rejects = REJECT.c.job_id == job.id, REJECT.c.unit.in_(units)
    tx.connection.execute(update(REJECT).where(*of_rejects).values(unit=None))
    samples = tx.connection.scalar(select(func.sum(UNIT.c.num_samples)).where(*of_units))
    # CAPTURED_SAMPLES stay: this job captures them again, and a later run of its schedule must not.
    for table in (SHARD, TOKEN_COUNTS, UNIT_COMMIT):
        tx.connection.execute(delete(table).where(table.c.job_id == job.id, table.c.unit.in_(units)))
    waits = UNLEASED | {"not_before": None, "problem": None, "attempts": 0, "deaths": 0}
    captures = TASK.c.job_id == job.id, TASK.c.kind == TaskKind.CAPTURE, TASK.c.item.in_(units)
    tx.connection.execute(update(TASK).where(*captures).values(waits | {"lone_deaths": None}))
    storing = TASK.c.job_id == job.id, TASK.c.kind == TaskKind.STORE, TASK.c.item == host
    tx.connection.execute(update(TASK).where(*storing).values(waits | {"state": TaskState.DONE}))
    publishing = TASK.c.job_id == job.id, TASK.c.kind == TaskKind.PUBLISH
    # Its epoch is kept: an attempt may still be under way.
    tx.connection.execute(update(TASK).where(*publishing).values(waits | {"state": TaskState.DONE}))
    counted = Counter(
        units_done=len(units),
        samples_written=int(samples or 0),
        tokens_written=sum(row.num_tokens for row in lost),
        bytes_written=sum(row.num_bytes for row in lost),
    )
    progress = count(job.progress, **{name: -number for name, number in counted.items()})
    message = f"{len(units)} captured units were lost with their host and run again"
    job = record(tx, replace(job, progress=progress), "progress", message)
    if job.state is JobState.PUBLISHING:
        jobs.queue_again(tx, stop(tx, job, JobState.BLOCKED))
    return counted
