"""Dependencies of the routes: the application's settings and store, and the job named in the path."""

from collections.abc import Callable
from typing import Annotated, Any, cast

from fastapi import Depends, Path, Request

from schemas.names import ScheduleName, is_job_id
from service.api.sse import EventFeed
from service.control.budget import Budget
from service.control.keys import Caller
from service.errors import NotFound
from service.settings import Settings
from service.store import JobRow, Store, jobs, schedule_rows, schedules


def _of_app(name: str) -> Any:  # noqa: ANN401 - as `Depends`
    """Return a dependency on what `create_app` keeps under a name."""

    async def kept(request: Request) -> object:
        return getattr(request.app.state, name)

    return Depends(kept)


async def caller_of(request: Request) -> Caller:
    """Return the caller, as `service.api.auth.caller` found it."""
    return cast(Caller, request.state.caller)


SettingsOf = Annotated[Settings, _of_app("settings")]
StoreOf = Annotated[Store, _of_app("store")]
StoppingOf = Annotated[Callable[[], bool], _of_app("stopping")]
BudgetOf = Annotated[Budget, _of_app("budget")]
FeedOf = Annotated[EventFeed, _of_app("feed")]
CallerOf = Annotated[Caller, Depends(caller_of)]


async def narrowed_settings(settings: SettingsOf, asks: CallerOf) -> Settings:
    """Return the settings with the folders and Hub namespaces that the caller may use."""
    return settings.narrowed(asks.grants)


NarrowedSettings = Annotated[Settings, Depends(narrowed_settings)]


def job_id_of(
    store: StoreOf, asks: CallerOf, job_id: Annotated[str, Path(description="`j-` and 16 hex digits")]
) -> str:
    """Return the id of the job that the path names, which may be one that cannot be read.

    Raises:
        NotFound: also for another owner's job, and for an id that no job can have, so that such a string
            never reaches the database.
    """
    if not is_job_id(job_id):
        raise NotFound(f"there is no job {job_id!r}", field="job_id", cure="GET /jobs lists the jobs")
    if not asks.sees(store.read(jobs.owner, job_id)):
        raise jobs.unknown(job_id)
    return job_id


JobIdOf = Annotated[str, Depends(job_id_of)]


def job_of(store: StoreOf, job_id: JobIdOf) -> JobRow:
    """Return the job that the path names, as it was a moment ago. Raises NotFound."""
    return store.read(jobs.job, job_id)


JobOf = Annotated[JobRow, Depends(job_of)]


NameOfSchedule = Annotated[
    ScheduleName, Path(alias="name", description="lower-case letters, digits and dashes")
]


def schedule_number(store: StoreOf, asks: CallerOf, name: NameOfSchedule) -> int:
    """Return the number of a schedule that the caller may see. Raises NotFound."""
    number, owner = store.read(schedules.numbered, name)
    if not asks.sees(owner):
        raise schedule_rows.unknown(name)
    return number


ScheduleNumberOf = Annotated[int, Depends(schedule_number)]
