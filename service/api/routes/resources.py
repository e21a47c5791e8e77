"""What a route is given: the settings and the store of its application, and the job that its path names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Path, Request

from schemas.base import Wire
from schemas.job import JobState
from schemas.names import is_job_id
from service.errors import NotFound
from service.settings import Settings
from service.store import Store, jobs


class NoOptions(Wire):
    """The query or body of a route that takes none: any field is an unknown one."""


def settings_of(request: Request) -> Settings:
    """Return the settings that the application was made with."""
    return cast(Settings, request.app.state.settings)


def store_of(request: Request) -> Store:
    """Return the application's store; it is thread-safe and closed by the application."""
    return cast(Store, request.app.state.store)


def stopping_of(request: Request) -> Callable[[], bool]:
    """Return what says whether the server is ending."""
    return cast(Callable[[], bool], request.app.state.stopping)


SettingsOf = Annotated[Settings, Depends(settings_of)]
StoreOf = Annotated[Store, Depends(store_of)]
StoppingOf = Annotated[Callable[[], bool], Depends(stopping_of)]


@dataclass(frozen=True, slots=True)
class NamedJob:
    """A job that exists, without its request, which may be 64 MiB. `state` is what it was a moment ago."""

    id: str
    state: JobState


def job_of(store: StoreOf, job_id: Annotated[str, Path(description="`j-` and 16 hex digits")]) -> NamedJob:
    """Return the job that the path names.

    Raises:
        NotFound: also for an id that no job can have, so that such a string never reaches the database.
    """
    if not is_job_id(job_id):
        raise NotFound(f"there is no job {job_id!r}", field="job_id", cure="GET /jobs lists the jobs")
    return NamedJob(job_id, store.read(jobs.state, job_id))


JobOf = Annotated[NamedJob, Depends(job_of)]
