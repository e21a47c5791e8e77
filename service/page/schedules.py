"""The pages of schedules: the list, and a single schedule with its slots."""

from typing import Annotated

from fastapi import Depends, Request, Response

from schemas.keys import Scope
from schemas.schedule import RunPage, SchedulePage
from service.api.routes.resources import ScheduleNumberOf, StoreOf
from service.api.routes.schedules import list_runs, list_schedules
from service.page.answers import page
from service.page.session import pages
from service.store import schedules

router = pages(Scope.SCHEDULES)


@router.get("/ui/schedules")
def schedules_page(request: Request, listed: Annotated[SchedulePage, Depends(list_schedules)]) -> Response:
    """Show the caller's schedules, or all for an admin key, by name."""
    return page(request, "schedules.html", listed=listed)


@router.get("/ui/schedules/{name}")
def schedule_page(
    request: Request,
    store: StoreOf,
    number: ScheduleNumberOf,
    passed: Annotated[RunPage, Depends(list_runs)],
) -> Response:
    """Show a schedule, its next slots, and the outcomes of past ones."""
    schedule = store.read(schedules.schedule_view, number)
    return page(request, "schedule.html", schedule=schedule, passed=passed)
