"""API keys: what their holders may do, and how the HTTP routes show them."""

from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from schemas.base import Moment, OpenEnum, Wire
from schemas.job import Priority, Problem
from schemas.names import SCHEDULE_NAME_PATTERN

EVERY_NAMESPACE = "*"


class Scope(OpenEnum):
    """What a key may be used for. ADMIN allows everything, for every owner, and managing keys."""

    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    SCHEDULES = "schedules"
    METRICS = "metrics"
    ADMIN = "admin"


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute():
        raise ValueError(f"{path!r} is not an absolute path")
    return path


KeyName = Annotated[str, StringConstraints(pattern=SCHEDULE_NAME_PATTERN)]
"""Lower-case letters, digits and dashes."""
Namespace = Annotated[str, StringConstraints(pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,95})$")]
"""A user or an organization of the Hub, or `*`."""
Root = Annotated[str, AfterValidator(_absolute)]


class Grants(Wire):
    """What a key allows. A null limit does not apply."""

    scopes: tuple[Scope, ...] = Field(min_length=1)
    hub_namespaces: tuple[Namespace, ...] = Field(
        default=(),
        description="namespaces whose repositories the service's Hub token is used for: to push, and to read "
        "those that are not public; `*` means all",
    )
    source_roots: tuple[Root, ...] = Field(
        default=(), description="folders below the service's source roots that file sources may be read from"
    )
    model_roots: tuple[Root, ...] = Field(
        default=(), description="folders below the service's model roots that local models may be loaded from"
    )
    max_jobs: int | None = Field(default=None, ge=1, description="most jobs that have not ended")
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="most bytes that its jobs' shards, requests and rejects, and posted samples take on the "
        "service",
    )
    max_priority: Priority | None = Field(default=None, description="highest priority of its jobs")
    requests_per_minute: int | None = Field(default=None, ge=1, description="limit in each API process")

    @property
    def is_admin(self) -> bool:
        """Whether everything is allowed."""
        return Scope.ADMIN in self.scopes


class NewKey(Grants):
    """The body of `POST /keys`."""

    name: KeyName = Field(description="the owner of jobs and schedules; keys with the same name share them")
    expires_at: Moment | None = None


class KeyView(NewKey):
    """A key without its secret."""

    id: str
    created_at: datetime
    revoked_at: datetime | None = None


class IssuedKey(KeyView):
    """A new key; only this answer holds its secret."""

    key: str


class UnreadableKey(Wire):
    """A key whose stored grants are damaged, or of a later version. It lets nobody in, and can be revoked."""

    id: str
    name: KeyName
    revoked_at: datetime | None = None
    problem: Problem


class KeyList(Wire):
    """All keys, oldest first, including revoked and expired ones."""

    keys: tuple[KeyView, ...]
    unreadable: tuple[UnreadableKey, ...] = ()
