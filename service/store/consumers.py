"""Consumers of a job whose shards are removed once all of them have read them, and each one's progress."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, select, update

from schemas.job import ConsumerPage, ConsumerView
from service.errors import Conflict, NotFound, RequestError
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.tables import CONSUMER, HOST, JOB, SHARD, UNIT, UNIT_COMMIT
from service.store.transitions import LockedJob, count, lock_job, record
from service.store.values import SERVICE

MAX_CONSUMERS = 64
"""Maximum number of consumers of a job."""
LISTENS_S = 10.0
"""The service says this often that it hears consumers."""
LATE_S = 2 * LISTENS_S
"""A service that has not said so for longer heard none meanwhile."""


def listens(tx: Transaction) -> None:
    """Record that the service hears consumers. The silence of a time in which it did not counts for none.

    That is a time in which no service ran or reached the database, or by which the database's clock was set.
    """
    check_write(tx)
    before = tx.connection.scalar(select(HOST.c.seen_at).where(HOST.c.number == SERVICE).with_for_update())
    tx.forget_time()
    if before is None:  # it was there when any of them was heard last
        before = tx.connection.scalar(select(func.max(CONSUMER.c.seen_at)))
    if before is not None and not _goes_on(tx, before):
        unheard = tx.now - before
        expiring = select(CONSUMER).where(CONSUMER.c.expires_at.is_not(None)).with_for_update()
        for one in tx.connection.execute(expiring.order_by(*CONSUMER.primary_key)).all():
            mine = update(CONSUMER).where(CONSUMER.c.job_id == one.job_id, CONSUMER.c.name == one.name)
            tx.connection.execute(mine.values(expires_at=one.expires_at + unheard))
    values = {"name": "service", "seen_at": tx.now, "there_since": tx.now}
    new = tx.insert(HOST).values(number=SERVICE, **values)
    tx.connection.execute(new.on_conflict_do_update(index_elements=["number"], set_=values))


def _listens_now(tx: Transaction) -> None:
    """Do as `listens` if it is due: what a consumer says now is not to be moved by a gap that is over."""
    before = tx.connection.scalar(select(HOST.c.seen_at).where(HOST.c.number == SERVICE))
    if before is not None and not _goes_on(tx, before):
        listens(tx)


def _goes_on(tx: Transaction, before: datetime) -> bool:
    """Return whether the service that listened at `before` has done so until now, by a clock that ran on."""
    return timedelta() <= tx.now - before <= timedelta(seconds=LATE_S)


def heard(tx: Transaction, job_id: str, name: str, expires_s: int | None) -> None:
    """Record a sign of life of a consumer, if it is known. Raises NotFound."""
    # PostgreSQL locks it anyway, after the consumers, where a row that refers to it is changed twice.
    lock_job(tx, job_id)
    _listens_now(tx)
    mine = update(CONSUMER).where(CONSUMER.c.job_id == job_id, CONSUMER.c.name == name)
    tx.connection.execute(mine.values(_told(tx, expires_s)))


def acknowledge(tx: Transaction, job_id: str, name: str, after: int, expires_s: int | None) -> list[str]:
    """Record that a consumer, new or known, has all units up to a place; return paths of shards to remove.

    A consumer is forgotten if it is silent for `expires_s`. Its place never moves back.

    Raises NotFound, Conflict if the job keeps its shards or has too many consumers, RequestError if no unit
    has that place yet.
    """
    job = lock_job(tx, job_id)
    if job.keeps_local or job.is_pushed:
        cure = "make the job with 'storage.retention': 'consumed'"
        raise Conflict(f"job {job_id} keeps its shards, whoever has read them", field="job_id", cure=cure)
    last = tx.connection.scalar(select(func.max(UNIT.c.place)).where(UNIT.c.job_id == job_id))
    if after > (-1 if last is None else last):
        cure = "give `next_after` of the last page of units whose rows were all taken"
        raise RequestError(f"no unit has the place {after} yet", field="after", cure=cure)
    _listens_now(tx)
    _lock_all(tx, job_id)
    _forget(tx, job_id, [other for other in _silent(tx, job_id) if other != name])
    mine = CONSUMER.c.job_id == job_id, CONSUMER.c.name == name
    before = tx.connection.scalar(select(CONSUMER.c.place).where(*mine))
    if before is None and len(of_job(tx, job_id).consumers) >= MAX_CONSUMERS:
        cure = "delete one, or let all ranks and workers be one consumer"
        raise Conflict(f"job {job_id} has {MAX_CONSUMERS} consumers", field="name", cure=cure)
    place = after if before is None else max(before, after)
    told = {"place": place, **_told(tx, expires_s)}
    new = tx.insert(CONSUMER).values(job_id=job_id, name=name, **told)
    tx.connection.execute(new.on_conflict_do_update(index_elements=["job_id", "name"], set_=told))
    return _let_go(tx, job)


def remove(tx: Transaction, job_id: str, name: str) -> list[str]:
    """Stop waiting for a consumer; return the paths of shards to remove. Raises NotFound."""
    job = lock_job(tx, job_id)
    mine = delete(CONSUMER).where(CONSUMER.c.job_id == job_id, CONSUMER.c.name == name)
    if not tx.connection.execute(mine).rowcount:
        raise NotFound(f"job {job_id} has no consumer {name!r}", field="name")
    return _let_go(tx, job)


def forget_all(tx: Transaction, job_id: str) -> None:
    """Delete the consumers of a job that is locked."""
    _lock_all(tx, job_id)
    tx.connection.execute(delete(CONSUMER).where(CONSUMER.c.job_id == job_id))


def of_job(tx: Transaction, job_id: str) -> ConsumerPage:
    """Return a job's consumers, the slowest first."""
    query = select(CONSUMER).where(CONSUMER.c.job_id == job_id).order_by(CONSUMER.c.place, CONSUMER.c.name)
    names = ConsumerView.model_fields
    rows = tx.connection.execute(query).mappings()
    return ConsumerPage(consumers=tuple(ConsumerView(**{name: row[name] for name in names}) for row in rows))


def waits(tx: Transaction, job_id: str, full: str | None) -> str | None:
    """Return which consumer a job waits for if `full` says that its worker's disk is full."""
    if full is None:
        return None
    by_place = of_job(tx, job_id).consumers
    if not by_place:
        return f"{full}; the job has no consumer"
    slowest = by_place[0]
    return f"{full}; consumer {slowest.name} was last heard of at {slowest.seen_at:%Y-%m-%d %H:%M} UTC"


def expire(tx: Transaction, job_id: str) -> None:
    """Forget a job's consumers that have been silent for longer than their `expires_s`. Raises NotFound."""
    if _silent(tx, job_id):
        job = lock_job(tx, job_id)
        _lock_all(tx, job_id)
        _forget(tx, job_id, _silent(tx, job_id))  # one of them may have spoken meanwhile
        _let_go(tx, job)


def consumed(tx: Transaction) -> list[str]:
    """Return the jobs whose shards are removed once they are consumed."""
    leave_nowhere = ~JOB.c.keeps_local, JOB.c.publish_subject == JOB.c.id
    return list(tx.connection.scalars(select(JOB.c.id).where(*leave_nowhere).order_by(JOB.c.number)))


def _told(tx: Transaction, expires_s: int | None) -> dict[str, datetime | None]:
    """Return the times of a consumer that is heard now."""
    expires_at = None if expires_s is None else tx.now + timedelta(seconds=expires_s)
    return {"seen_at": tx.now, "expires_at": expires_at}


def _lock_all(tx: Transaction, job_id: str) -> None:
    """Lock a job's consumers in order, as `listens` does: the two could deadlock otherwise."""
    of_job = select(CONSUMER.c.name).where(CONSUMER.c.job_id == job_id)
    tx.connection.execute(of_job.order_by(CONSUMER.c.name).with_for_update())
    tx.forget_time()


def _silent(tx: Transaction, job_id: str) -> list[str]:
    """Return a job's consumers that were silent for their `expires_s` while the service heard them."""
    heard_until = select(HOST.c.seen_at).where(HOST.c.number == SERVICE).scalar_subquery()
    late = select(CONSUMER.c.name).where(CONSUMER.c.job_id == job_id, CONSUMER.c.expires_at <= heard_until)
    return list(tx.connection.scalars(late))


def _forget(tx: Transaction, job_id: str, names: Sequence[str]) -> None:
    tx.connection.execute(delete(CONSUMER).where(CONSUMER.c.job_id == job_id, CONSUMER.c.name.in_(names)))


def _let_go(tx: Transaction, job: LockedJob) -> list[str]:
    """Mark as stored the units that all consumers, if there are any, have; return their shards' paths."""
    least = select(func.min(CONSUMER.c.place)).where(CONSUMER.c.job_id == job.id).scalar_subquery()
    had = select(UNIT.c.unit).where(UNIT.c.job_id == job.id, UNIT.c.place <= least)
    mine: ColumnElement[bool] = (UNIT_COMMIT.c.job_id == job.id) & ~UNIT_COMMIT.c.is_stored
    gone = select(UNIT_COMMIT.c.unit, UNIT_COMMIT.c.num_bytes).where(mine, UNIT_COMMIT.c.unit.in_(had))
    sizes = {unit: num_bytes for unit, num_bytes in tx.connection.execute(gone)}
    if not sizes:
        return []
    units = list(sizes)
    tx.connection.execute(
        update(UNIT_COMMIT).where(mine, UNIT_COMMIT.c.unit.in_(units)).values(is_stored=True)
    )
    progress = count(job.progress, units_stored=len(units), bytes_gone=sum(sizes.values()))
    message = f"{progress.units_stored} of {progress.units_done} captured units are consumed"
    record(tx, replace(job, progress=progress), "progress", message)
    paths = select(SHARD.c.path).where(SHARD.c.job_id == job.id, SHARD.c.unit.in_(units))
    return list(tx.connection.scalars(paths))
