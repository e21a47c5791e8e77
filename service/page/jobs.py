"""The pages of jobs: the list, a single job, its files, and its rejects."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import Field

from schemas.job import JobState
from schemas.keys import Scope
from service.api.routes.jobs import JobsQuery, PageQuery, list_jobs, reject_page
from service.api.routes.resources import CallerOf, JobOf, StoreOf
from service.page.answers import page
from service.page.progress import rates
from service.page.session import pages
from service.store import JobRow, Transaction, canaries, commits, jobs, schedules, units
from service.visible import visible

EVENTS_SHOWN, UNITS_SHOWN, FILES_SHOWN, REJECTS_COUNTED, CHECKS_COUNTED = 12, 20, 4, 500, 100
"""How many rows of a job's tables one page reads: a job may have a hundred thousand."""
REQUEST_SHOWN = 16_384
"""How many characters of a request are shown; it may hold megabytes of samples."""

router = pages(Scope.JOBS_READ)


class ListQuery(PageQuery):
    """Which part of a job's list."""

    limit: int = Field(default=100, ge=1, le=100)


@router.get("/")
def jobs_page(
    request: Request, store: StoreOf, asks: CallerOf, query: Annotated[JobsQuery, Query()]
) -> Response:
    """Show the caller's jobs, or all jobs for an admin key, newest first."""
    return page(request, "jobs.html", listed=list_jobs(store, asks, query), query=query, states=JobState)


@router.get("/ui/jobs/{job_id}")
def job_page(request: Request, store: StoreOf, job: JobOf) -> Response:
    """Show a job."""
    return page(request, "job.html", job=job.view(), **store.read(job_context, job))


@router.get("/ui/jobs/{job_id}/files")
def files_page(
    request: Request, store: StoreOf, job: JobOf, query: Annotated[ListQuery, Query()]
) -> Response:
    """Show the files of a job's committed units, in the order of their commits."""
    listed = store.read(commits.readable, job.id, after=query.after, limit=query.limit)
    return page(request, "files.html", job=job, listed=listed, more=len(listed.units) == query.limit)


@router.get("/ui/jobs/{job_id}/rejects")
def rejects_page(
    request: Request, store: StoreOf, job: JobOf, query: Annotated[ListQuery, Query()]
) -> Response:
    """Show which samples are not in the dataset, and why."""
    return page(request, "rejects.html", job=job, listed=reject_page(job, store, query))


def job_context(tx: Transaction, job: JobRow) -> dict[str, Any]:
    """Return the context of a job's page besides the job. Raises NotFound if it was deleted meanwhile."""
    listed = commits.readable(tx, job.id, after=-1, limit=FILES_SHOWN)
    events = jobs.recent_events(tx, job.id, EVENTS_SHOWN)
    head = jobs.request_head(tx, job.id, REQUEST_SHOWN + 1)
    is_cut = len(head) > REQUEST_SHOWN
    text = head[:REQUEST_SHOWN] if is_cut else json.dumps(json.loads(head), indent=2, ensure_ascii=False)
    made = job.provenance
    canary = None if made is None else canaries.report(tx, canaries.canary_digest(made))
    return {
        "schedule": schedules.name_of(tx, job.id),
        "rates": rates(events, datetime.now(UTC)),
        "in_work": units.in_work(tx, job.id),
        "open_units": units.open_units(tx, job.id, UNITS_SHOWN),
        "checks": commits.last_checks(tx, job.id, CHECKS_COUNTED),
        "canary": canary,
        "rejects": commits.rejects(tx, job.id, limit=REJECTS_COUNTED),
        "listed": listed,
        "events": events,
        "request_text": visible(text),
        "is_cut": is_cut,
    }
