"""Canary reports, one per combination of model, layers and engine, so that a passed canary is not rerun."""

from sqlalchemy import select

from schemas.dataset.manifest import CanaryReport
from schemas.digest import canonical_sha256
from schemas.identity import Identity, Provenance
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.tables import CANARY


def canary_digest(made: Provenance) -> str:
    """Return the key of a passed canary: a digest of everything that can change the captured states."""
    parts = _states_parts(made.identity) | {"engine": made.engine.model_dump(mode="json")}
    return canonical_sha256(parts | {"quarry": made.service_version})


def states_digest(identity: Identity) -> str:
    """Return the key of the last passed canary of these states on any engine."""
    return canonical_sha256(_states_parts(identity))


def _states_parts(identity: Identity) -> dict[str, object]:
    states = identity.model_dump(mode="json", include={"dtype", "layer_ids"})
    return states | {"model_sha256": identity.model_sha256()}


def report(tx: Transaction, digest: str) -> CanaryReport | None:
    """Return the report stored under `digest`, without what a later version may have added to it."""
    stored: str | None = tx.connection.scalar(select(CANARY.c.report).where(CANARY.c.digest == digest))
    return None if stored is None else CanaryReport.answered(stored.encode())


def record(tx: Transaction, digest: str, passed: CanaryReport) -> None:
    """Store a report in the place of an older one, unless that is of longer prompts."""
    check_write(tx)
    older = report(tx, digest)
    if older is not None and older.tokens > passed.tokens:
        return
    values = {"digest": digest, "report": passed.model_dump_json()}
    new = tx.insert(CANARY).values(values)
    tx.connection.execute(new.on_conflict_do_update(index_elements=["digest"], set_=values))
