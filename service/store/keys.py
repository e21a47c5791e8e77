"""API keys: made, found, listed and revoked; and what an owner's keys allow together."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, func, insert, or_, select, update
from sqlalchemy.engine import Row, RowMapping

from schemas.job import ENDED_JOB_STATES
from schemas.keys import Grants, KeyList, KeyView, NewKey, Scope, UnreadableKey
from service.errors import KeyRefused, NotFound, QuarryError, QuotaExceeded
from service.store.database import Transaction
from service.store.job_rows import rows_of
from service.store.migration import check_write
from service.store.tables import API_KEY, JOB

NOTHING = Grants(scopes=(Scope.JOBS_READ,))
"""The grants of an owner whose keys are all revoked or expired: what is public."""

REJECT_BYTES = 256
"""What the record of a rejected sample takes in the database: 244 bytes, of 25,000 rows without text."""

MAKES_JOBS = frozenset({Scope.JOBS_WRITE, Scope.SCHEDULES})


def add(tx: Transaction, key_id: str, sha256: str, new: NewKey) -> KeyView:
    """Store a key with the digest of its secret."""
    check_write(tx)
    grants = Grants(**new.model_dump(include=set(Grants.model_fields)))
    values = {"id": key_id, "sha256": sha256, "grants": grants, "created_at": tx.now}
    tx.connection.execute(insert(API_KEY).values(name=new.name, expires_at=new.expires_at, **values))
    return view(tx, key_id)


def every(tx: Transaction) -> KeyList:
    """Return all keys, oldest first."""
    query = select(API_KEY).order_by(API_KEY.c.created_at, API_KEY.c.id)
    try:
        return KeyList(keys=tuple(_view(row._mapping) for row in _rows(tx, query)))
    except QuarryError:
        pass  # one by one
    readable, unreadable = [], []
    shown = API_KEY.c.id, API_KEY.c.name, API_KEY.c.revoked_at
    for row in tx.connection.execute(query.with_only_columns(*shown)).all():
        try:
            readable.append(view(tx, row.id))
        except QuarryError as error:
            unreadable.append(UnreadableKey(**row._mapping, problem=error.problem()))
    return KeyList(keys=tuple(readable), unreadable=tuple(unreadable))


def exists(tx: Transaction) -> bool:
    """Return whether a key was ever made."""
    return tx.connection.scalar(select(API_KEY.c.id).limit(1)) is not None


def active(tx: Transaction, key_id: str) -> tuple[KeyView, str] | None:
    """Return a key that is neither revoked nor expired, and the digest of its secret."""
    query = select(API_KEY).where(API_KEY.c.id == key_id, _is_active(tx))
    return next(((_view(row._mapping), row.sha256) for row in _rows(tx, query)), None)


def view(tx: Transaction, key_id: str) -> KeyView:
    """Return a key. Raises NotFound; QuarryError if it cannot be read."""
    row = next(iter(_rows(tx, select(API_KEY).where(API_KEY.c.id == key_id))), None)
    if row is None:
        raise _unknown(key_id)
    return _view(row._mapping)


def revoke(tx: Transaction, key_id: str) -> None:
    """Revoke a key, also one that cannot be read; one that is revoked is not changed. Raises NotFound."""
    check_write(tx)
    is_it = API_KEY.c.id == key_id
    if tx.connection.scalar(select(API_KEY.c.id).where(is_it)) is None:
        raise _unknown(key_id)
    revoked = update(API_KEY).where(is_it, API_KEY.c.revoked_at.is_(None)).values(revoked_at=tx.now)
    tx.connection.execute(revoked)


def granted(tx: Transaction, owner: str | None) -> Grants | None:
    """Return what an owner's jobs may read: everything that any of the owner's keys allows.

    None if nothing is limited: the owner is the operator, or has an admin key.
    """
    if owner is None:
        return None
    all_grants = _of_owner(tx, owner)
    if any(grants.is_admin for grants in all_grants):
        return None
    reading = ("hub_namespaces", "source_roots", "model_roots")
    together = {
        name: tuple(one for grants in all_grants for one in getattr(grants, name)) for name in reading
    }
    return NOTHING.model_copy(update=together)


def limited_owners(tx: Transaction) -> set[str]:
    """Return the owners of keys for whom `is_limited` is true."""
    owners = tx.connection.scalars(select(API_KEY.c.name).distinct()).all()
    return {owner for owner in owners if is_limited(tx, owner)}


def is_limited(tx: Transaction, owner: str) -> bool:
    """Return whether an owner's bytes are limited, or may be: one of the owner's keys cannot be read."""
    try:
        return any(grants.max_bytes is not None for grants in _that_count(tx, owner))
    except QuarryError:
        return True


def usual_priority(tx: Transaction, owner: str | None) -> int:
    """Return the priority of a job that asks for none: 0, or less if a key of its owner allows no more."""
    all_grants = [] if owner is None else _of_owner(tx, owner)
    most = [one.max_priority for one in all_grants if one.max_priority is not None and not one.is_admin]
    return min([0, *most])


def check_quota(tx: Transaction, owner: str | None) -> None:
    """Return only if an owner may have another job.

    Raises QuotaExceeded, which names the tightest limit; KeyRefused if no valid key of the owner may make
    jobs any more, which happens with schedules.

    On PostgreSQL the owner's keys stay locked, so that two submissions cannot both take the last place.
    """
    if owner is None:
        return
    all_grants = _of_owner(tx, owner, lock=True)
    if not any(grants.is_admin or MAKES_JOBS.intersection(grants.scopes) for grants in all_grants):
        cure = f"make a key of the name {owner} that may make jobs, or delete the schedules of that owner"
        detail = f"every key of {owner} is revoked, expired or may make no jobs"
        raise KeyRefused(detail, field="Authorization", cure=cure)
    unended = func.count().filter(JOB.c.state.not_in(ENDED_JOB_STATES))
    num_jobs = tx.connection.scalar(select(unended).where(JOB.c.owner == owner)) or 0
    _check(owner, all_grants, "max_jobs", num_jobs, "wait until one has ended, or cancel one")
    check_bytes(tx, owner)


def check_bytes(tx: Transaction, owner: str | None, posted_bytes: int = 0) -> None:
    """Return only if an owner may have more bytes: of requests, existing shards, rejects, posted samples.

    The limits hold on when the last key has ended, since what is planned continues. Raises QuotaExceeded.
    """
    if owner is None:
        return
    of_job = JOB.c.bytes_written - JOB.c.bytes_gone + JOB.c.request_bytes
    kept = func.sum(of_job + JOB.c.samples_rejected * REJECT_BYTES)
    num_bytes = posted_bytes + int(tx.connection.scalar(select(kept).where(JOB.c.owner == owner)) or 0)
    _check(owner, _that_count(tx, owner), "max_bytes", num_bytes, "delete jobs with their datasets")


def _check(owner: str, all_grants: Sequence[Grants], name: str, used: int, cure: str) -> None:
    limits = [limit for grants in all_grants if (limit := getattr(grants, name)) is not None]
    if limits and used >= min(limits):
        detail = f"the jobs of {owner} take {used} of the {min(limits)} that {name} allows"
        raise QuotaExceeded(detail, field="Authorization", cure=cure)


def _of_owner(tx: Transaction, owner: str, *, lock: bool = False) -> Sequence[Grants]:
    query = select(API_KEY.c.grants).where(API_KEY.c.name == owner, _is_active(tx))
    # A worker's role may not read the ids of keys.
    rows = rows_of(tx, query.with_for_update() if lock else query, API_KEY.c.name, "key")
    return [row.grants for row in rows]


def _that_count(tx: Transaction, owner: str) -> Sequence[Grants]:
    """Return the grants of an owner's valid keys, or if there are none, of the last that was valid."""
    if valid := _of_owner(tx, owner):  # one that has ended does not count, and may be damaged
        return valid
    # A worker's role may read no other columns.
    query = select(API_KEY.c.grants, API_KEY.c.expires_at, API_KEY.c.revoked_at)
    rows = rows_of(tx, query.where(API_KEY.c.name == owner), API_KEY.c.name, "key")
    valid_until = [min(filter(None, (tx.now, row.expires_at, row.revoked_at))) for row in rows]
    last = max(valid_until, default=None)
    return [row.grants for row, until in zip(rows, valid_until, strict=True) if until == last]


def _is_active(tx: Transaction) -> ColumnElement[bool]:
    unexpired = or_(API_KEY.c.expires_at.is_(None), API_KEY.c.expires_at > tx.now)
    return API_KEY.c.revoked_at.is_(None) & unexpired


def _unknown(key_id: str) -> NotFound:
    return NotFound(f"there is no key {key_id!r}", field="key_id", cure="GET /keys lists the keys")


def _rows(tx: Transaction, query: Select[Any]) -> Sequence[Row[Any]]:
    """Return the keys that a query finds. Raises QuarryError, which names one that is damaged."""
    return rows_of(tx, query, API_KEY.c.id, "key")


def _view(row: RowMapping) -> KeyView:
    grants: Grants = row["grants"]
    own = {name: row[name] for name in ("id", "name", "expires_at", "created_at", "revoked_at")}
    return KeyView(**grants.model_dump(), **own)
