"""What a route is given: the settings and the store of its application, and the job that its path names."""

from collections.abc import Callable
from typing import Annotated, cast

from fastapi import Depends, Path, Request

from schemas.base import Wire
from schemas.names import is_job_id
from service.errors import NotFound
from service.settings import Settings
from service.store import JobRow, Store, jobs


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


def job_of(store: StoreOf, job_id: Annotated[str, Path(description="`j-` and 16 hex digits")]) -> JobRow:
    """Return the job that the path names, as it was a moment ago.

    Raises:
        NotFound: also for an id that no job can have, so that such a string never reaches the database.
    """
    if not is_job_id(job_id):
        raise NotFound(f"there is no job {job_id!r}", field="job_id", cure="GET /jobs lists the jobs")
    return store.read(jobs.job, job_id)


JobOf = Annotated[JobRow, Depends(job_of)]
