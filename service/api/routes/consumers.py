"""The consumers of a job whose shards are removed once every consumer has read them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import APIRouter, Path, Security
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from schemas.base import Wire
from schemas.job import ConsumerPage
from schemas.keys import Scope
from service.api.auth import caller
from service.api.json_route import JsonRoute
from service.api.problems import problem_responses
from service.api.routes.options import NO_QUERY
from service.api.routes.resources import JobOf, SettingsOf, StoreOf
from service.capture.attempt_files import land_left, remove_paths
from service.errors import DiskFull, WriteFailed, removing, writing
from service.store import Store, consumers
from service.work.runner import attempt

ConsumerName = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
MAX_EXPIRES_S = 30 * 86_400

READS, WRITES = ([Security(caller, scopes=[scope])] for scope in (Scope.JOBS_READ, Scope.JOBS_WRITE))

router = APIRouter(
    prefix="/jobs/{job_id}/consumers",
    tags=["jobs"],
    dependencies=NO_QUERY,
    responses=problem_responses(401, 403, 404, 422, 429),
    route_class=JsonRoute,
)


class Acknowledged(Wire):
    """The body of `PUT /jobs/{id}/consumers/{name}`."""

    after: int = Field(
        default=-1, ge=-1, lt=2**63, description="`next_after` of the last page whose rows were all read"
    )
    expires_s: int | None = Field(
        default=None,
        ge=60,
        le=MAX_EXPIRES_S,
        description="forget the consumer after this many silent seconds",
    )


@router.get("", dependencies=READS)
def list_consumers(job: JobOf, store: StoreOf) -> ConsumerPage:
    """List a job's consumers, the slowest first."""
    return store.read(consumers.of_job, job.id)


@router.put("/{name}", status_code=204, dependencies=WRITES, responses=problem_responses(409, 415, 503, 507))
def acknowledge(
    job: JobOf, name: ConsumerName, body: Acknowledged, store: StoreOf, settings: SettingsOf
) -> None:
    """Register a consumer or record its progress; shards that all consumers have are removed."""
    try:
        with writing("the files of a unit that is acknowledged"):
            land_left(store, settings, job.id)  # its index stays, whether or not anybody opened its files
    except (WriteFailed, DiskFull):  # not its fault: it is there, and must not be dropped for silence
        store.write(consumers.heard, job.id, name, body.expires_s)
        raise
    gone = store.write(consumers.acknowledge, job.id, name, body.after, body.expires_s)
    with removing():
        remove_paths(settings, job.id, gone)


@router.delete("/{name}", status_code=204, dependencies=WRITES, responses=problem_responses(503))
def remove(job: JobOf, name: ConsumerName, store: StoreOf, settings: SettingsOf) -> None:
    """Remove a consumer; shards that all others have are removed."""
    gone = store.write(consumers.remove, job.id, name)
    with removing():
        remove_paths(settings, job.id, gone)


@asynccontextmanager
async def listening(store: Store) -> AsyncIterator[None]:
    """Have the store know that consumers are heard, until this ends."""
    await _listens(store)
    goes_on = asyncio.create_task(_go_on(store))
    try:
        yield
    finally:
        goes_on.cancel()
        await asyncio.wait([goes_on])


async def _go_on(store: Store) -> None:
    while True:
        await asyncio.sleep(consumers.LISTENS_S)
        await _listens(store)


async def _listens(store: Store) -> None:
    with attempt("recording that consumers are heard"):  # until it can be, none is dropped
        await run_in_threadpool(store.write, consumers.listens)
