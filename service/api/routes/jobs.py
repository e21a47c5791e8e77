"""Jobs: read, pause, cancel, resume and delete them, follow their events, read what they wrote."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, HTTPException, Query, Request, Response, Security
from fastapi.responses import FileResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from schemas.base import Wire
from schemas.dataset.manifest import Manifest
from schemas.job import RESTING_JOB_STATES, JobPage, JobState, JobSummary, Priority, RejectPage, UnitPage
from schemas.keys import Scope
from schemas.names import FINAL_NORM_PATH, manifest_path
from schemas.request import ExtractRequest
from service.api.auth import caller
from service.api.json_route import JsonRoute
from service.api.problems import problem_responses
from service.api.routes.options import NO_OPTIONS, NO_QUERY
from service.api.routes.resources import (
    BudgetOf,
    CallerOf,
    FeedOf,
    JobIdOf,
    JobOf,
    SettingsOf,
    StoppingOf,
    StoreOf,
)
from service.control.budget import Turn
from service.control.deletion import delete_job
from service.errors import CallerRefused, IllegalMove, KeyRefused, NotFound, StoreUnavailable
from service.store import JobRow, Store, commits, jobs, keys

MAX_ID = 2**63 - 1
"""The largest number a database column holds."""
LISTING_S, GONE_S = 0.5, 5.0
"""Least and greatest time between two looks for an awaited unit: one looks after a new event, or checks
whether the caller is still connected."""
ASK_AGAIN_S, QUIET_S = 10.0, 60.0
"""How old the last check of an event stream's key may be; and that of a silent stream."""


OneRange = Annotated[
    str | None,
    Header(
        alias="Range",
        pattern=r"^bytes=([0-9]{1,19}-([0-9]{1,19})?|-[0-9]{1,19})$",
        description="a single byte range",
    ),
]

PART: dict[int | str, dict[str, Any]] = {206: {"description": "the requested range"}}

ANY = problem_responses(401, 403, 429)
reading, changing = (
    APIRouter(
        prefix="/jobs",
        tags=["jobs"],
        dependencies=[Security(caller, scopes=[scope])],
        responses=ANY,
        route_class=JsonRoute,
    )
    for scope in (Scope.JOBS_READ, Scope.JOBS_WRITE)
)


class JobsQuery(Wire):
    """Which page of jobs."""

    state: JobState | None = None
    cursor: str | None = Field(default=None, max_length=256, description="`next_cursor` of the previous page")
    limit: int = Field(default=50, ge=1, le=200)


class EventsQuery(Wire):
    """Where to begin in the events; a `Last-Event-ID` header overrides it."""

    after: int = Field(default=0, ge=0, le=MAX_ID)


class PageQuery(Wire):
    """Which part of a job's list: `next_after` of the previous page."""

    after: int = Field(default=-1, ge=-1, le=MAX_ID)
    limit: int = Field(default=1000, ge=1, le=10_000)


class PriorityChange(Wire):
    """The body of `PATCH /jobs/{id}`."""

    priority: Priority


class UnitsQuery(PageQuery):
    """Which part of a job's units, and how long to wait for one if there are none."""

    limit: int = Field(default=100, ge=1, le=1000)
    wait: int = Field(default=0, ge=0, le=60, description="seconds to wait if there are none")


class DeleteQuery(Wire):
    """What happens to the dataset in the data folder when its job is deleted."""

    dataset: Literal["keep", "delete"] = "keep"


@reading.get("", responses=problem_responses(422))
def list_jobs(store: StoreOf, asks: CallerOf, query: Annotated[JobsQuery, Query()]) -> JobPage:
    """List the caller's jobs (with an admin's key, all jobs) without their requests, newest first."""
    page, cursor = store.read(
        jobs.page, owner=asks.sees_only, state=query.state, cursor=query.cursor, limit=query.limit
    )
    return JobPage(jobs=tuple(row.view() for row in page), next_cursor=cursor)


@reading.get("/{job_id}", dependencies=NO_QUERY, responses=problem_responses(404, 422))
def read_job(job: JobOf) -> JobSummary:
    """Return the state of a job."""
    return job.view()


@changing.patch("/{job_id}", dependencies=NO_QUERY, responses=problem_responses(404, 415, 422))
def change_job(job: JobOf, store: StoreOf, asks: CallerOf, change: PriorityChange) -> JobSummary:
    """Change a job's priority; work that is already leased is not given back."""
    asks.check_priority(change.priority)
    return store.write(jobs.set_priority, job.id, change.priority).view()


@changing.delete("/{job_id}", status_code=204, responses=problem_responses(404, 409, 422, 503))
def delete(
    job_id: JobIdOf,
    store: StoreOf,
    settings: SettingsOf,
    asks: CallerOf,
    query: Annotated[DeleteQuery, Query()],
) -> None:
    """Delete a job that has ended and, on request, its local dataset; what is on the Hub stays.

    An owner with a byte limit must delete the dataset as well, since it would no longer be counted.
    """
    if query.dataset == "keep" and asks.owner is not None and store.read(keys.is_limited, asks.owner):
        cure = "delete it with dataset=delete"
        detail = "an owner of a key with max_bytes cannot keep the dataset"
        raise CallerRefused(detail, field="dataset", cure=cure)
    delete_job(store, settings, job_id, with_dataset=query.dataset == "delete")


@reading.get(
    "/{job_id}/request",
    dependencies=NO_QUERY,
    response_class=Response,
    responses={200: {"model": ExtractRequest}, **problem_responses(404, 422)},
)
async def read_request(job_id: JobIdOf, store: StoreOf, asks: CallerOf, budget: BudgetOf) -> Response:
    """Return the request that the job was made from, with every default filled in."""
    async with budget.turn(asks.owner, Turn.DOWNLOAD):
        document = await run_in_threadpool(store.read, jobs.request_json, job_id)
        return Response(document, media_type="application/json")


@changing.post("/{job_id}/cancel", dependencies=NO_OPTIONS, responses=problem_responses(404, 409, 415, 422))
def cancel_job(job_id: JobIdOf, store: StoreOf) -> JobSummary:
    """Cancel a job; what it has committed is kept for a resume."""
    return store.write(jobs.cancel, job_id).view()


@changing.post("/{job_id}/pause", dependencies=NO_OPTIONS, responses=problem_responses(404, 409, 415, 422))
def pause_job(job: JobOf, store: StoreOf) -> JobSummary:
    """Pause a job until it is resumed: its leased work is given back, and what it has committed is kept."""
    return store.write(jobs.pause, job.id).view()


@changing.post("/{job_id}/resume", dependencies=NO_OPTIONS, responses=problem_responses(404, 409, 415, 422))
def resume_job(job: JobOf, store: StoreOf) -> JobSummary:
    """Queue a paused, blocked, failed or cancelled job again; it continues from what is committed."""
    return store.write(jobs.resume, job.id).view()


@reading.get("/{job_id}/events", response_class=EventSourceResponse, responses=problem_responses(404, 422))
async def follow_job(
    job: JobOf,
    feed: FeedOf,
    request: Request,
    query: Annotated[EventsQuery, Query()],
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_ID)] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Stream state changes and progress until the job ends, is blocked or paused, or the key is revoked."""
    after = query.after if last_event_id is None else last_event_id
    asked_s = time.monotonic()
    async for event in feed.follow(job.id, job.state, after, QUIET_S):
        if event is None or time.monotonic() - asked_s > ASK_AGAIN_S:
            try:
                await run_in_threadpool(request.state.ask_again)
            except (KeyRefused, StoreUnavailable):
                return  # the client comes back, and is told
            asked_s = time.monotonic()
        if event is not None:
            yield event


@reading.get("/{job_id}/units", responses=problem_responses(404, 422))
async def list_units(
    job: JobOf,
    store: StoreOf,
    settings: SettingsOf,
    stopping: StoppingOf,
    feed: FeedOf,
    request: Request,
    query: Annotated[UnitsQuery, Query()],
) -> UnitPage:
    """List committed units that can be read, in commit order; with `wait`, wait for one if there are none.

    Units that are committed or become readable later follow all those listed before.
    """
    clock = asyncio.get_running_loop().time
    until_s, seen = clock() + query.wait, 0
    listing = partial(commits.readable, job_id=job.id, after=query.after, limit=query.limit)
    page = await run_in_threadpool(store.read, listing)
    while (now_s := clock()) < until_s and not (page.units or page.state in RESTING_JOB_STATES or stopping()):
        try:
            async with asyncio.timeout_at(min(until_s, now_s + GONE_S)):
                await asyncio.sleep(LISTING_S)
                seen = await feed.newer(job.id, seen)
        except TimeoutError:
            if await request.is_disconnected():
                break
            continue
        page = await run_in_threadpool(store.read, listing)
    if query.wait:
        await run_in_threadpool(request.state.ask_again)
    return page.model_copy(update={"folder": str(settings.dataset_dir(job.id).absolute())})


@reading.get(
    "/{job_id}/manifest",
    dependencies=NO_QUERY,
    response_class=FileResponse,
    responses={200: {"model": Manifest}, **PART, **problem_responses(404, 409, 416, 422)},
)
def read_manifest(job: JobOf, settings: SettingsOf, part: OneRange = None) -> FileResponse:
    """Return the manifest of a completed job, as stored in the dataset."""
    if job.state is not JobState.COMPLETED:
        raise IllegalMove(
            f"job {job.id} is {job.state}: a manifest is only made of a completed job", field="job_id"
        )
    try:
        return _sent(settings.dataset_dir(job.id) / manifest_path(job.id), "application/json", part)
    except FileNotFoundError:
        cure = "a job that had no new samples, or no rows, has none; else its dataset was deleted or moved"
        gone = f"the data folder holds no manifest of job {job.id}"
        raise NotFound(gone, field="job_id", cure=cure) from None


@reading.get(
    "/{job_id}/files/{path:path}",
    dependencies=NO_QUERY,
    response_class=FileResponse,
    responses={**PART, **problem_responses(404, 416, 422)},
)
def read_file(job: JobOf, store: StoreOf, settings: SettingsOf, path: str, part: OneRange = None) -> Response:
    """Return a file of the dataset, or a range of it, from the data folder.

    `final_norm.safetensors` can be read from the first commit on; until it is published, only as a whole.
    """
    folder = settings.dataset_dir(job.id).resolve()
    try:
        file = (folder / path).resolve()
        if file.is_relative_to(folder) and file.is_file():
            return _sent(file, "application/octet-stream", part)
    except (OSError, ValueError):  # no file can have such a name, or it was removed since
        pass
    if path == FINAL_NORM_PATH:
        return Response(store.read(commits.final_norm, job.id), media_type="application/octet-stream")
    cure = "GET /jobs/{job_id}/units says which files there are, and whether the folder has them"
    raise NotFound(f"the data folder holds no such file of job {job.id}", field="path", cure=cure)


def _sent(file: Path, media_type: str, part: str | None) -> FileResponse:
    """Return a file or a range of it. Raises HTTPException and FileNotFoundError."""
    found = file.stat()
    if part is not None:
        _check_range(part, found.st_size)
    return FileResponse(file, media_type=media_type, stat_result=found)


def _check_range(part: str, num_bytes: int) -> None:
    """Raise HTTPException if a file has none of a range; starlette would say so in plain text."""
    first, last = (int(number) if number else None for number in part.removeprefix("bytes=").split("-"))
    is_empty = last == 0 if first is None else first >= num_bytes or (last is not None and last < first)
    if is_empty or not num_bytes:
        detail = f"the file has {num_bytes} bytes, and none of {part}"
        raise HTTPException(416, detail, {"Content-Range": f"bytes */{num_bytes}"})


@reading.get(
    "/{job_id}/rejects",
    response_class=Response,
    responses={200: {"model": RejectPage}, **problem_responses(404, 422)},
)
async def list_rejects(
    job: JobOf, store: StoreOf, asks: CallerOf, budget: BudgetOf, query: Annotated[PageQuery, Query()]
) -> Response:
    """List the rejected samples, by their position in the source."""
    async with budget.turn(asks.owner, Turn.DOWNLOAD):  # ten thousand of them may take 40 MB
        document = await run_in_threadpool(lambda: reject_page(job, store, query).model_dump_json())
        return Response(document, media_type="application/json")


def reject_page(job: JobRow, store: Store, query: PageQuery) -> RejectPage:
    """Return a page of a job's rejects."""
    rejects = store.read(commits.rejects, job.id, after=query.after, limit=query.limit)
    positions = sorted({reject.position for reject in rejects})
    next_after = positions[-1] if len(positions) == query.limit else None
    return RejectPage(rejects=tuple(rejects), next_after=next_after)


router = APIRouter()
router.include_router(reading)
router.include_router(changing)
