"""The pages of jobs: all of them, one, its files, and its rejects."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import Field

from schemas.dataset.manifest import CanaryReport, UnitChecks
from schemas.job import JOB_MOVES, RESTING_JOB_STATES, JobState, RejectView
from schemas.keys import Scope
from service.api.routes.jobs import JobsQuery, PageQuery
from service.api.routes.resources import CallerOf, JobOf, StoreOf
from service.page.answers import page
from service.page.progress import numbers, rates, waits_for
from service.page.session import pages
from service.store import JobRow, Transaction, canaries, commits, jobs, units
from service.visible import visible

EVENTS_SHOWN, UNITS_SHOWN, FILES_SHOWN = 12, 20, 4
REJECTS_COUNTED, CHECKS_COUNTED = 500, 100
"""Rows of a job that one page reads: a job may have a hundred thousand."""
WHOLE_REQUEST, CUT_REQUEST = 16_384, 4_000
"""Characters of a request up to which it is shown whole, and to which a longer one is cut."""
MOVES = {"pause": JobState.PAUSED, "resume": JobState.QUEUED, "cancel": JobState.CANCELLED} | {
    "delete": JobState.DELETING
}

router = pages(Scope.JOBS_READ)


class ListQuery(PageQuery):
    """Which part of a job's list."""

    limit: int = Field(default=100, ge=1, le=100)


@router.get("/")
def jobs_page(
    request: Request, store: StoreOf, asks: CallerOf, query: Annotated[JobsQuery, Query()]
) -> Response:
    """Show the caller's jobs, an admin's key all, newest first."""
    rows, cursor = store.read(
        jobs.page, owner=asks.sees_only, state=query.state, cursor=query.cursor, limit=query.limit
    )
    shown = [(row, numbers(row.progress, row.state), waits_for(row)) for row in rows]
    return page(request, "jobs.html", jobs=shown, cursor=cursor, query=query, states=JobState)


@router.get("/ui/jobs/{job_id}")
def job_page(request: Request, store: StoreOf, job: JobOf) -> Response:
    """Show a job."""
    return page(request, "job.html", **store.read(job_context, job))


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
    listed = store.read(commits.rejects, job.id, after=query.after, limit=query.limit)
    positions = {reject.position for reject in listed}
    more = max(positions) if len(positions) == query.limit else None
    return page(request, "rejects.html", job=job, rejects=listed, more=more)


def job_context(tx: Transaction, job: JobRow) -> dict[str, Any]:
    """Return what a job's page shows."""
    progress, events = job.progress, jobs.recent_events(tx, job.id, EVENTS_SHOWN)
    return {
        "job": job,
        "numbers": numbers(progress, job.state) | rates(events, datetime.now(UTC)),
        "waits": waits_for(job),
        "in_work": units.in_work(tx, job.id),
        "open_units": units.open_units(tx, job.id, UNITS_SHOWN),
        "events": events[::-1],
        "reasons": _by_reason(commits.rejects(tx, job.id, limit=REJECTS_COUNTED)),
        "rejects_counted": REJECTS_COUNTED,
        "checks": _sums(commits.last_checks(tx, job.id, CHECKS_COUNTED)),
        "checks_counted": CHECKS_COUNTED,
        "canary": _canary(tx, job),
        "listed": commits.readable(tx, job.id, after=-1, limit=FILES_SHOWN),
        "request_text": _request_text(jobs.request_head(tx, job.id, WHOLE_REQUEST + 1)),
        "commands": commands(job),
    }


def commands(job: JobRow) -> list[tuple[str, str]]:
    """Return what may be done with a job in its state, and the command that does it."""
    watch = [] if job.state in RESTING_JOB_STATES else [("watch it", f"quarry jobs watch {job.id}")]
    moves = [
        (f"{verb} it", f"quarry jobs {verb} {job.id}")
        for verb, to in MOVES.items()
        if to in JOB_MOVES[job.state]
    ]
    return watch + moves


def _by_reason(rejects: Sequence[RejectView]) -> list[tuple[str, int, RejectView]]:
    """Return the reasons, the most frequent first, with how often and the first sample of each."""
    first = {reject.reason: reject for reject in reversed(rejects)}
    counts = Counter(reject.reason for reject in rejects)
    return [(reason, number, first[reason]) for reason, number in counts.most_common()]


def _sums(checks: Sequence[UnitChecks]) -> UnitChecks | None:
    """Return the sum of some units' checks; none where there is none."""
    if not checks:
        return None
    rows = {name: sum(getattr(one, name) for one in checks) for name in ("rows_checked", "logit_rows")}
    agree = sum(one.logit_argmax_agree for one in checks)
    return UnitChecks(
        **rows, logit_argmax_agree=agree, logit_max_error=max(one.logit_max_error for one in checks)
    )


def _canary(tx: Transaction, job: JobRow) -> CanaryReport | None:
    made = job.provenance
    stored = None if made is None else canaries.report(tx, canaries.canary_digest(made))
    return None if stored is None else CanaryReport.model_validate_json(stored)


def _request_text(head: str) -> tuple[str, bool]:
    """Return a request to read, and whether it is cut."""
    if len(head) > WHOLE_REQUEST:
        return visible(head[:CUT_REQUEST]), True
    return visible(json.dumps(json.loads(head), indent=2, ensure_ascii=False)), False
