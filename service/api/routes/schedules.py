"""Schedules: make, read, change and delete them, list their slots, and run one now."""

from datetime import datetime
from functools import partial
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Query, Request, Response, Security
from pydantic import BaseModel, Field

from schemas.base import Moment, Wire
from schemas.keys import Scope
from schemas.request import ExtractRequest
from schemas.schedule import (
    NewSchedule,
    PostedCount,
    PostedSamples,
    RunPage,
    RunView,
    ScheduleChange,
    SchedulePage,
    ScheduleView,
    UnreadableSchedule,
)
from service.api.auth import caller
from service.api.json_route import JsonRoute
from service.api.problems import problem_responses
from service.api.routes.extract import body_of
from service.api.routes.options import NO_OPTIONS, NO_QUERY
from service.api.routes.resources import (
    BudgetOf,
    CallerOf,
    NarrowedSettings,
    ScheduleNumberOf,
    SettingsOf,
    StoreOf,
)
from service.control import scheduling
from service.control.budget import Turn
from service.control.request_body import CheckedSamples, read_body, read_samples
from service.store import schedules

router = APIRouter(
    prefix="/schedules",
    tags=["schedules"],
    dependencies=[Security(caller, scopes=[Scope.SCHEDULES])],
    responses=problem_responses(401, 403, 429),
    route_class=JsonRoute,
)


def _body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that is read by hand, as that of `POST /extract` is: it may be as large."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs")  # they are among the document's components already, since other routes name them
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


MAX_SCHEDULE_BYTES = 2 * 2**20
"""A schedule's request is read anew at each slot, while the database is locked; it holds no samples."""

NewBody = Annotated[NewSchedule, Depends(body_of(partial(read_body, NewSchedule), MAX_SCHEDULE_BYTES))]
ChangeBody = Annotated[
    ScheduleChange, Depends(body_of(partial(read_body, ScheduleChange), MAX_SCHEDULE_BYTES))
]
BODY, CHANGE_BODY, SAMPLES_BODY = _body_of(NewSchedule), _body_of(ScheduleChange), _body_of(PostedSamples)


class AddQuery(Wire):
    """Whether a schedule is kept."""

    preview: bool = Field(
        default=False, description="check the schedule and show its slots, but keep nothing"
    )


class SchedulesQuery(Wire):
    """Which page of schedules."""

    after: str = Field(
        default="", pattern=r"^[a-z0-9-]{0,63}$", description="`next_after` of the previous page"
    )
    limit: int = Field(default=50, ge=1, le=200)


class RunsQuery(Wire):
    """Which page of a schedule's slots."""

    before: Moment | None = Field(default=None, description="`next_before` of the previous page")
    limit: int = Field(default=50, ge=1, le=1000)


@router.post(
    "", status_code=201, openapi_extra=BODY, responses=problem_responses(409, 413, 415, 422, 503, 507)
)
async def add_schedule(
    request: Request,
    body: NewBody,
    response: Response,
    store: StoreOf,
    settings: NarrowedSettings,
    asks: CallerOf,
    budget: BudgetOf,
    query: Annotated[AddQuery, Query()],
) -> ScheduleView:
    """Make a schedule; with `preview=true`, only show it and its next slots, with status 200."""
    turn = budget.checking(asks.owner)
    if query.preview:
        response.status_code = 200
        made = scheduling.preview
    else:
        response.headers["Location"] = f"/schedules/{body.name}"
        made = scheduling.add
    make = partial(made, store, settings, body, asks.owner, turn)
    async with budget.turn(asks.owner, Turn.SUBMISSION):
        return await to_thread.run_sync(make, limiter=request.app.state.submit_threads)


@router.get("", responses=problem_responses(422))
def list_schedules(store: StoreOf, asks: CallerOf, query: Annotated[SchedulesQuery, Query()]) -> SchedulePage:
    """List the caller's schedules (with an admin's key, all) by name, without their requests."""
    page = store.read(schedules.page, owner=asks.sees_only, after=query.after, limit=query.limit)
    return SchedulePage(
        schedules=tuple(one for one in page if isinstance(one, ScheduleView)),
        unreadable=tuple(one for one in page if isinstance(one, UnreadableSchedule)),
        next_after=page[-1].name if len(page) == query.limit else None,
    )


@router.get("/{name}", dependencies=NO_QUERY, responses=problem_responses(404, 422))
def read_schedule(number: ScheduleNumberOf, store: StoreOf) -> ScheduleView:
    """Return the state of a schedule and its next slots."""
    return store.read(schedules.schedule_view, number)


@router.get(
    "/{name}/request",
    dependencies=NO_QUERY,
    response_class=Response,
    responses={200: {"model": ExtractRequest}, **problem_responses(404, 422)},
)
def read_schedule_request(number: ScheduleNumberOf, store: StoreOf) -> Response:
    """Return the request that its jobs are made from, with every default filled in."""
    return Response(store.read(schedules.request_json, number), media_type="application/json")


@router.patch(
    "/{name}",
    dependencies=NO_QUERY,
    openapi_extra=CHANGE_BODY,
    responses=problem_responses(404, 409, 413, 415, 422, 503),
)
async def change_schedule(
    request: Request,
    number: ScheduleNumberOf,
    change: ChangeBody,
    store: StoreOf,
    settings: NarrowedSettings,
    asks: CallerOf,
    budget: BudgetOf,
) -> ScheduleView:
    """Change when a schedule makes jobs, or what they capture; or pause it. New times apply from now on."""
    turn = budget.checking(asks.owner)
    make = partial(scheduling.change, store, settings, number, change, turn)
    if change.request is None:
        return await to_thread.run_sync(make)
    async with budget.turn(asks.owner, Turn.SUBMISSION):
        return await to_thread.run_sync(make, limiter=request.app.state.submit_threads)


@router.delete("/{name}", status_code=204, dependencies=NO_QUERY, responses=problem_responses(404, 422, 503))
def delete_schedule(number: ScheduleNumberOf, store: StoreOf, settings: SettingsOf) -> None:
    """Delete a schedule and the samples posted for its next job; its jobs stay."""
    scheduling.remove(store, settings, number)


@router.post(
    "/{name}/samples",
    status_code=202,
    dependencies=NO_QUERY,
    openapi_extra=SAMPLES_BODY,
    responses=problem_responses(404, 409, 413, 415, 422, 503, 507),
)
def post_samples(
    number: ScheduleNumberOf,  # looked up before the body comes: another schedule may have the name by then
    body: Annotated[CheckedSamples, Depends(body_of(read_samples))],
    store: StoreOf,
    settings: SettingsOf,
) -> PostedCount:
    """Post samples for the schedule's next job; they are on disk before the answer. Safe to repeat."""
    scheduling.post_samples(store, settings, number, body)
    return PostedCount(samples=body.number)


@router.post(
    "/{name}/run",
    status_code=202,
    dependencies=NO_OPTIONS,
    responses=problem_responses(404, 409, 415, 422, 507),
)
def run_schedule(number: ScheduleNumberOf, store: StoreOf, settings: SettingsOf) -> RunView:
    """Make a job of the schedule now, in addition to those of its slots."""
    return scheduling.run_now(store, settings, number)


@router.get("/{name}/runs", responses=problem_responses(404, 422))
def list_runs(number: ScheduleNumberOf, store: StoreOf, query: Annotated[RunsQuery, Query()]) -> RunPage:
    """List the slots that have passed, newest first."""
    runs = store.read(schedules.past, number, before=query.before, limit=query.limit)
    last: datetime | None = runs[-1].slot if len(runs) == query.limit else None
    return RunPage(runs=tuple(runs), next_before=last)
