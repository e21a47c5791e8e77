"""The pages of schedules: all of them, and one with its slots."""

from typing import Annotated

from fastapi import Query, Request, Response

from schemas.keys import Scope
from service.api.routes.resources import CallerOf, ScheduleNumberOf, StoreOf
from service.api.routes.schedules import RunsQuery, SchedulesQuery
from service.page.answers import page
from service.page.session import pages
from service.store import schedules

router = pages(Scope.SCHEDULES)


@router.get("/ui/schedules")
def schedules_page(
    request: Request, store: StoreOf, asks: CallerOf, query: Annotated[SchedulesQuery, Query()]
) -> Response:
    """Show the caller's schedules, an admin's key all, by name."""
    listed = store.read(schedules.page, owner=asks.sees_only, after=query.after, limit=query.limit)
    more = listed[-1].name if len(listed) == query.limit else None
    return page(request, "schedules.html", schedules=listed, more=more)


@router.get("/ui/schedules/{name}")
def schedule_page(
    request: Request, store: StoreOf, number: ScheduleNumberOf, query: Annotated[RunsQuery, Query()]
) -> Response:
    """Show a schedule, its next slots, and what became of those that passed."""
    schedule = store.read(schedules.schedule_view, number)
    runs = store.read(schedules.past, number, before=query.before, limit=query.limit)
    more = runs[-1].slot if len(runs) == query.limit else None
    return page(request, "schedule.html", schedule=schedule, runs=runs, more=more)
