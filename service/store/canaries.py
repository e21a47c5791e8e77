"""Canary reports, one per combination of model, layers and engine, so that a passed canary is not rerun."""

from sqlalchemy import select

from schemas.digest import canonical_sha256
from schemas.identity import Identity, Provenance
from service.store.database import Transaction
from service.store.migration import check_write
from service.store.tables import CANARY

_LONGEST_PROMPT = 1024 + 129
"""The canary compares a prompt's last 129 tokens: all of the longest's are past a sliding window of 1,024."""


def canary_tokens(identity: Identity) -> int:
    """Return the tokens of the canary's longest prompt: as many as a row may have, up to a bound."""
    return min(identity.max_tokens, _LONGEST_PROMPT)


def canary_digest(made: Provenance) -> str:
    """Return the key of a passed canary: a digest of everything that can change the captured states."""
    parts = _states_parts(made.identity) | {"engine": made.engine.model_dump(mode="json")}
    return canonical_sha256(parts | {"quarry": made.service_version})


def states_digest(identity: Identity) -> str:
    """Return the key of the last passed canary of these states on any engine."""
    return canonical_sha256(_states_parts(identity))


def _states_parts(identity: Identity) -> dict[str, object]:
    states = identity.model_dump(mode="json", include={"dtype", "layer_ids"})
    return states | {"model_sha256": identity.model_sha256(), "canary_tokens": canary_tokens(identity)}


def report(tx: Transaction, digest: str) -> str | None:
    """Return the report stored under `digest`."""
    report: str | None = tx.connection.scalar(select(CANARY.c.report).where(CANARY.c.digest == digest))
    return report


def record(tx: Transaction, digest: str, report_json: str) -> None:
    """Store a report, replacing an older one."""
    check_write(tx)
    new = tx.insert(CANARY).values(digest=digest, report=report_json)
    tx.connection.execute(new.on_conflict_do_update(index_elements=["digest"], set_={"report": report_json}))
