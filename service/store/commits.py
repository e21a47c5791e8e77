"""Unit commits: one transaction makes a unit done and records its shards. Also reads commits back."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, insert, select, update

from schemas.dataset.entries import ShardEntry
from schemas.dataset.manifest import UnitChecks
from schemas.identity import Provenance
from schemas.job import RejectView, UnitPage, UnitView
from schemas.receipts import AttemptId
from service.errors import EngineChanged, IdentityChanged, NotFound, StatesWrong
from service.store import captured_samples, keys, storing, tasks, workers
from service.store.database import Transaction
from service.store.job_rows import rows_of
from service.store.plans import add_pass, add_rejects
from service.store.tables import FINAL_NORM, JOB, REJECT, SHARD, TOKEN_COUNTS, UNIT, UNIT_COMMIT, UNIT_PLAN
from service.store.transitions import LockedJob
from service.store.values import HOME, UnitCommit, UnitFiles, UnitLease

SAME = ("provenance", "num_tokens", "supervised_tokens", "checks")
"""Columns of a commit that have the same names as the fields of `UnitCommit`."""
OF_FILES = UNIT_COMMIT.c.unit, UNIT_COMMIT.c.epoch, UNIT_COMMIT.c.index_file
"""The columns of a commit that `_files_of` reads."""


def commit(tx: Transaction, made: UnitCommit, lease: UnitLease) -> None:
    """Make a unit done, with its shards, index, rejects and sample hashes, or change nothing.

    If the job is pushed, the unit's plan is kept until the unit is stored, with the rows as written.

    Raises:
        LeaseLost: another attempt owns the unit, it is already done, or its job was stopped.
        IdentityChanged: captured for another identity, or with another final norm than the job's first unit.
        EngineChanged: captured by another engine than that unit.
        StatesWrong: a sample is missing or duplicated, or a shard is another attempt's.
        QuotaExceeded: the job's owner had already used all bytes that its keys allow.
    """
    job, task = tasks.held(tx, lease)
    _check_identity(job, made.provenance)
    _check_account(lease, made)
    keys.check_bytes(tx, job.owner)
    _keep_final_norm(tx, job, made.final_norm)
    place = {"job_id": job.id, "unit": task.item}
    new = insert(UNIT_COMMIT).values(
        **place,
        epoch=task.epoch,
        host=lease.host,
        is_stored=job.is_pushed and not made.shards,
        index_file=made.index,
        num_bytes=sum(entry.bytes for entry in made.shards),
        committed_at=tx.now,
        **{name: getattr(made, name) for name in SAME},
    )
    tx.connection.execute(new)
    of_unit = (UNIT_PLAN.c.job_id == job.id) & (UNIT_PLAN.c.unit == task.item)
    if not (job.is_pushed and made.shards):
        tx.connection.execute(delete(UNIT_PLAN).where(of_unit))
    elif made.plan:
        written = {"content": made.plan, "sha256": hashlib.sha256(made.plan).hexdigest(), "is_answered": True}
        tx.connection.execute(update(UNIT_PLAN).where(of_unit).values(written))
    tx.connection.execute(insert(TOKEN_COUNTS).values(**place, content=made.token_counts))
    if made.shards:
        rows = [place | {"path": entry.path, "entry": entry} for entry in made.shards]
        tx.connection.execute(insert(SHARD), rows)
    new_here = (UNIT.c.job_id == job.id) & (UNIT.c.unit == task.item) & UNIT.c.place.is_(None)
    # Every commit is an event.
    tx.connection.execute(update(UNIT).where(new_here).values(place=job.last_event))
    add_rejects(tx, job.id, task.item, made.rejects)
    captured_samples.add(tx, job, task.item, made.content_hashes)
    if lease.is_probe:
        workers.proven(tx, lease)
    job = tasks.done(
        tx,
        replace(job, provenance=job.provenance or made.provenance, captured_at=tx.now),
        task,
        units_done=1,
        samples_written=sum(entry.rows for entry in made.shards),
        samples_rejected=len(made.rejects),
        tokens_written=made.num_tokens,
        bytes_written=sum(entry.bytes for entry in made.shards),
        units_stored=int(job.is_pushed and not made.shards),
    )
    if job.is_pushed and made.shards and not job.progress.is_captured:
        storing.add(tx, job, lease.host)
    add_pass(tx, job)
    storing.end_when_captured(tx, job)


def unit_commits(tx: Transaction, job_id: str) -> list[UnitCommit]:
    """Return a job's commits, in unit order."""
    shards_of, rejects_of = _by_unit(tx, job_id)
    query = select(UNIT_COMMIT).where(UNIT_COMMIT.c.job_id == job_id).order_by(UNIT_COMMIT.c.unit)
    return [
        UnitCommit(
            attempt_id=AttemptId(job_id=job_id, unit=row["unit"], epoch=row["epoch"]),
            shards=tuple(shards_of[row["unit"]]),
            index=row["index_file"],
            rejects=tuple(rejects_of[row["unit"]]),
            **{name: row[name] for name in (*SAME, "is_stored", "host")},
        )
        for row in tx.connection.execute(query).mappings()
    ]


def of_attempt(tx: Transaction, attempt_id: AttemptId) -> UnitFiles | None:
    """Return what an attempt committed in the data folder, or None once it is stored elsewhere."""
    job_id, of_unit = attempt_id.job_id, UNIT_COMMIT.c.unit == attempt_id.unit
    mine = and_(UNIT_COMMIT.c.job_id == job_id, of_unit, UNIT_COMMIT.c.epoch == attempt_id.epoch)
    here = select(*OF_FILES).where(mine, UNIT_COMMIT.c.host == HOME, ~UNIT_COMMIT.c.is_stored)
    return next(iter(_files_of(tx, job_id, tx.connection.execute(here).all())), None)


def waiting(tx: Transaction, job_id: str, host: int, max_files: int) -> list[UnitFiles]:
    """Return a host's lowest committed, unstored units: at least one, within `max_files` otherwise."""
    mine = and_(UNIT_COMMIT.c.job_id == job_id, UNIT_COMMIT.c.host == host, ~UNIT_COMMIT.c.is_stored)
    lowest = select(*OF_FILES).where(mine).order_by(UNIT_COMMIT.c.unit).limit(max_files)
    units: list[UnitFiles] = []
    num_files = 0
    for unit in _files_of(tx, job_id, tx.connection.execute(lowest).all()):
        num_files += len(unit.files)
        if units and num_files > max_files:
            break
        units.append(unit)
    return units


def shards(tx: Transaction, job_id: str) -> list[ShardEntry]:
    """Return the committed shards of a job, in unit order."""
    query = select(SHARD.c.entry).where(SHARD.c.job_id == job_id).order_by(SHARD.c.unit, SHARD.c.path)
    return list(tx.connection.scalars(query))


def num_shards(tx: Transaction, job_id: str) -> int:
    """Return how many shards a job will have, if each unit that is left has one; 0 if the job is gone."""
    # One statement, so that a unit that is committed or lost with its host meanwhile is counted once.
    made = select(func.count()).where(SHARD.c.job_id == job_id).scalar_subquery()
    of_job = select(made + JOB.c.units_planned - JOB.c.units_done).where(JOB.c.id == job_id)
    return tx.connection.execute(of_job).scalar() or 0


def gone_shards(tx: Transaction, job_id: str) -> list[str]:
    """Return the paths of a job's stored shards that are not kept here."""
    stored = (UNIT_COMMIT.c.job_id == SHARD.c.job_id) & (UNIT_COMMIT.c.unit == SHARD.c.unit)
    query = select(SHARD.c.path).join(UNIT_COMMIT, stored & UNIT_COMMIT.c.is_stored)
    goes = query.join(JOB, JOB.c.id == SHARD.c.job_id).where(JOB.c.id == job_id, ~JOB.c.keeps_local)
    return list(tx.connection.scalars(goes))


def readable(tx: Transaction, job_id: str, *, after: int, limit: int) -> UnitPage:
    """Return units that can be read, in the order of their commits, starting after the place `after`.

    They end before the first unit that its host has not stored yet, or that was lost with its host: a reader
    sees neither that unit nor later ones until it is available, and so misses none. A unit that is captured
    again keeps its place. Raises NotFound, since the job may be deleted while a reader waits for its next
    unit.
    """
    of_job = select(JOB.c.state, JOB.c.keeps_local, JOB.c.publish_subject).where(JOB.c.id == job_id)
    job = tx.connection.execute(of_job).one_or_none()
    if job is None:
        raise NotFound(f"there is no job {job_id}", field="job_id")
    made = [UNIT_COMMIT.c[name] for name in ("epoch", "host", "is_stored", "index_file")]
    committed = (UNIT_COMMIT.c.job_id == UNIT.c.job_id) & (UNIT_COMMIT.c.unit == UNIT.c.unit)
    query = select(UNIT.c.place, UNIT.c.unit, *made).outerjoin(UNIT_COMMIT, committed)
    query = query.where(UNIT.c.job_id == job_id, UNIT.c.place > after).order_by(UNIT.c.place).limit(limit)
    rows = list(takewhile(lambda row: row.is_stored or row.host == HOME, tx.connection.execute(query)))
    units = tuple(
        UnitView(
            unit=row.unit,
            epoch=row.epoch,
            shards=files.shards,
            index=files.index,
            in_folder=row.host == HOME and (job.keeps_local or not row.is_stored),
            in_repository=row.is_stored and job.publish_subject != job_id,
        )
        for row, files in zip(rows, _files_of(tx, job_id, rows), strict=True)
    )
    return UnitPage(
        units=units,
        next_after=rows[-1].place if rows else after,
        state=job.state,
        repository=job.publish_subject if job.publish_subject != job_id else None,
    )


def readable_unit(tx: Transaction, job_id: str, unit: int) -> UnitView | None:
    """Return a unit that can be read, or None if it is not committed or its host has not stored it yet."""
    place = tx.connection.scalar(select(UNIT.c.place).where(UNIT.c.job_id == job_id, UNIT.c.unit == unit))
    made = () if place is None else readable(tx, job_id, after=place - 1, limit=1).units
    return made[0] if made else None


def last_checks(tx: Transaction, job_id: str, limit: int) -> list[UnitChecks]:
    """Return the checks of the committed units with the highest numbers."""
    of_job = select(UNIT_COMMIT.c.checks).where(UNIT_COMMIT.c.job_id == job_id)
    return list(tx.connection.scalars(of_job.order_by(UNIT_COMMIT.c.unit.desc()).limit(limit)))


def token_counts(tx: Transaction, job_id: str, *, after: int) -> dict[int, bytes]:
    """Return the packed counts of supervised tokens of the next 100 units above `after`, by unit."""
    query = select(TOKEN_COUNTS.c.unit, TOKEN_COUNTS.c.content).order_by(TOKEN_COUNTS.c.unit).limit(100)
    of_units = (TOKEN_COUNTS.c.job_id == job_id) & (TOKEN_COUNTS.c.unit > after)
    return {row.unit: row.content for row in tx.connection.execute(query.where(of_units))}


def final_norm(tx: Transaction, job_id: str) -> bytes:
    """Return the content of `final_norm.safetensors`. Raises NotFound before the job's first commit."""
    query = select(FINAL_NORM.c.content).where(FINAL_NORM.c.job_id == job_id)
    content: bytes | None = tx.connection.scalars(query).one_or_none()
    if content is None:
        raise NotFound(f"no unit of job {job_id} is committed yet", field="path")
    return content


def rejects(tx: Transaction, job_id: str, *, after: int = -1, limit: int = 1000) -> list[RejectView]:
    """Return all rejects at the next `limit` positions above `after`, from the plan and the units."""
    behind = REJECT.c.job_id == job_id, REJECT.c.position > after
    next_ones = select(REJECT.c.position).where(*behind).distinct().order_by(REJECT.c.position).limit(limit)
    query = select(REJECT.c.entry).where(REJECT.c.job_id == job_id, REJECT.c.position.in_(next_ones))
    query = query.order_by(REJECT.c.position, REJECT.c.turn)
    return [row.entry for row in rows_of(tx, query, REJECT.c.job_id)]


def _files_of(tx: Transaction, job_id: str, made: Sequence[Any]) -> list[UnitFiles]:
    """Return the files of committed units; the rows `made` have `unit`, `epoch` and `index_file`."""
    of_units = (SHARD.c.job_id == job_id) & SHARD.c.unit.in_([row.unit for row in made])
    shards_of: dict[int, list[ShardEntry]] = defaultdict(list)
    for entry in tx.connection.scalars(select(SHARD.c.entry).where(of_units).order_by(SHARD.c.path)):
        shards_of[entry.unit].append(entry)
    return [
        UnitFiles(
            AttemptId(job_id=job_id, unit=row.unit, epoch=row.epoch),
            tuple(shards_of[row.unit]),
            row.index_file,
        )
        for row in made
    ]


def _by_unit(tx: Transaction, job_id: str) -> tuple[dict[int, list[ShardEntry]], dict[int, list[RejectView]]]:
    """Return the shards and the rejects of every unit that has any."""
    shards_of: dict[int, list[ShardEntry]] = defaultdict(list)
    for entry in shards(tx, job_id):
        shards_of[entry.unit].append(entry)
    of_units: ColumnElement[bool] = (REJECT.c.job_id == job_id) & REJECT.c.unit.is_not(None)
    rejects_of: dict[int, list[RejectView]] = defaultdict(list)
    query = select(REJECT.c.unit, REJECT.c.entry).where(of_units).order_by(REJECT.c.position, REJECT.c.turn)
    for unit, view in tx.connection.execute(query):
        rejects_of[unit].append(view)
    return shards_of, rejects_of


def _check_identity(job: LockedJob, provenance: Provenance) -> None:
    """Refuse states of another identity, or from another engine than the first unit's.

    Raises IdentityChanged, EngineChanged.
    """
    if provenance.identity != job.identity:
        raise IdentityChanged(f"the unit was captured for another identity than that of job {job.id}")
    first = job.provenance or provenance
    was, now = (p.engine.title for p in (first, provenance))
    if was != now:
        raise other_engine(job.id, was, now)


def other_engine(job_id: str, was: str, now: str) -> EngineChanged:
    """Return the error of a job that was begun with an engine other than the one that is there now."""
    return EngineChanged(
        f"job {job_id} was begun with {was}; {now} may round differently",
        cure=f"resume with {was}, or submit a new job",
    )


def _keep_final_norm(tx: Transaction, job: LockedJob, content: bytes) -> None:
    """Keep the final norm of the first unit, so that a later change of the model cannot change the dataset.

    Raises IdentityChanged.
    """
    if job.provenance is None:
        tx.connection.execute(insert(FINAL_NORM).values(job_id=job.id, content=content))
    elif content != final_norm(tx, job.id):
        raise IdentityChanged(
            f"the model's final norm is not that of the first unit of job {job.id}",
            cure="restore the model as it was and resume, or submit a new job",
        )


def _check_account(lease: UnitLease, made: UnitCommit) -> None:
    """Refuse a commit that loses or duplicates a sample, or whose files are another attempt's.

    Raises StatesWrong.
    """
    accounted = sum(entry.rows for entry in made.shards) + len(made.rejects)
    if accounted != lease.num_samples:
        raise StatesWrong(f"unit {lease.item} accounts for {accounted} of its {lease.num_samples} samples")
    for entry in made.shards:
        if (entry.unit, entry.epoch) != (lease.item, lease.epoch):
            raise StatesWrong(
                f"{entry.path} is of unit {entry.unit} epoch {entry.epoch}, not of this attempt"
            )
