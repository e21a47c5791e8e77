"""API keys: what their holder may do, and what the HTTP routes say of them."""

from datetime import datetime
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field, StringConstraints

from schemas.base import OpenEnum, Wire
from schemas.job import Priority
from schemas.names import SCHEDULE_NAME_PATTERN

EVERY_NAMESPACE = "*"


class Scope(OpenEnum):
    """What a key may be used for. ADMIN is everything, for every owner, and the keys themselves."""

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
    """What a key allows. A limit that is null does not count."""

    scopes: tuple[Scope, ...] = Field(min_length=1)
    hub_namespaces: tuple[Namespace, ...] = Field(
        default=(),
        description="the service's Hub token is used for repositories of these: to push, and to read what is "
        "not public; `*` is every one",
    )
    source_roots: tuple[Root, ...] = Field(
        default=(), description="folders that file sources may be read from, inside the service's own"
    )
    model_roots: tuple[Root, ...] = Field(
        default=(), description="folders that local models may be loaded from, inside the service's own"
    )
    max_jobs: int | None = Field(default=None, ge=1, description="jobs that have not ended")
    max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="bytes that its jobs' shards and requests and posted samples take here",
    )
    max_priority: Priority | None = Field(default=None, description="that its jobs may be given")
    requests_per_minute: int | None = Field(default=None, ge=1, description="of each process of the API")

    @property
    def is_admin(self) -> bool:
        """Whether everything is allowed."""
        return Scope.ADMIN in self.scopes


class NewKey(Grants):
    """The body of `POST /keys`."""

    name: KeyName = Field(description="the owner of jobs and schedules; keys of one name share them")
    expires_at: AwareDatetime | None = None


class KeyView(NewKey):
    """A key without its secret."""

    id: str
    created_at: datetime
    revoked_at: datetime | None = None


class IssuedKey(KeyView):
    """A new key: the only answer that holds its secret."""

    key: str


class KeyList(Wire):
    """Every key, oldest first; revoked and expired ones too."""

    keys: tuple[KeyView, ...]
