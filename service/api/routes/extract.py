"""POST /extract and POST /estimate: read the body, then make a job of it or estimate what it would need."""

import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any, TypeVar

from anyio import from_thread, to_thread
from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response, Security
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from schemas.base import Wire
from schemas.job import Estimate, JobSummary, Priority
from schemas.keys import Scope
from service.api.auth import caller
from service.api.gate import SMALL_BODY_BYTES
from service.api.json_route import check_is_json
from service.api.problems import problem_responses
from service.api.routes.resources import BudgetOf, CallerOf, NarrowedSettings, SettingsOf, StoppingOf, StoreOf
from service.control.budget import Taken, Turn
from service.control.request_body import CheckedRequest, read_apart, read_request, read_weighed
from service.control.submit import check_fits, submit

Read = TypeVar("Read")

router = APIRouter(
    tags=["extract"],
    dependencies=[Security(caller, scopes=[Scope.JOBS_WRITE])],
    responses=problem_responses(401, 403, 429),
)

BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ExtractRequest"}}},
    }
}
"""The body is read by hand, off the event loop, because a large document takes a second to check."""


class SubmitOptions(Wire):
    """The query of `POST /extract`."""

    priority: Priority = Field(default=0, description="jobs with a higher priority run first")


IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[ -~]+$",
        description="the same key and body give the same job; the same key with another body is a conflict",
    ),
]


async def raw_body(
    request: Request, settings: SettingsOf, asks: CallerOf, budget: BudgetOf
) -> AsyncIterator[bytes]:
    """Yield the body, which must be JSON. A large one counts in its caller's budget until it is answered."""
    check_is_json(request)
    num_bytes = int(request.headers.get("content-length", settings.max_body_bytes))
    if num_bytes <= SMALL_BODY_BYTES:
        yield await request.body()
        return
    with budget.taking(asks.owner, Taken.BYTES, num_bytes):
        yield await request.body()


def body_of(
    read: Callable[[bytes], Read], most_bytes: int | None = None
) -> Callable[..., Coroutine[Any, Any, Read]]:
    """Return a dependency that applies `read` to a body of bounded weight.

    A small body is read in a thread; large ones in processes, a few at a time. Raises what `read` raises,
    HTTPException, ServiceBusy.
    """

    async def body(
        raw: Annotated[bytes, Depends(raw_body, scope="function")],
        settings: SettingsOf,
        asks: CallerOf,
        budget: BudgetOf,
    ) -> Read:
        limit_bytes = min(most_bytes or settings.max_body_bytes, settings.max_body_bytes)
        if len(raw) <= SMALL_BODY_BYTES:
            weighed, made = await run_in_threadpool(read_weighed, read, raw, limit_bytes)
        else:
            async with budget.turn(asks.owner, Turn.LARGE_BODY):
                weighed, made = await run_in_threadpool(read_apart, read, raw, limit_bytes, settings)
        if made is None:
            raise HTTPException(413, f"the body counts as {weighed} bytes; at most {limit_bytes} are taken")
        return made

    return body


Body = Annotated[CheckedRequest, Depends(body_of(read_request))]


@router.post(
    "/extract",
    status_code=202,
    openapi_extra=BODY,
    responses=problem_responses(409, 413, 415, 422, 503, 507),
)
async def extract(
    request: Request,
    body: Body,
    response: Response,
    store: StoreOf,
    settings: NarrowedSettings,
    asks: CallerOf,
    budget: BudgetOf,
    options: Annotated[SubmitOptions, Query()],
    idempotency_key: IdempotencyKey = None,
) -> JobSummary:
    """Submit a job. The answer is its current state; `Location` is the URL to follow it at."""
    asks.check_priority(options.priority)
    key = idempotency_key or secrets.token_hex(16)
    arguments = body, key, store, settings, options.priority, asks.owner, budget.checking(asks.owner)
    async with budget.turn(asks.owner, Turn.SUBMISSION):
        row = await to_thread.run_sync(submit, *arguments, limiter=request.app.state.submit_threads)
    response.headers["Location"] = f"/jobs/{row.id}"
    return row.view()


@router.post("/estimate", openapi_extra=BODY, responses=problem_responses(413, 415, 422, 503, 507))
async def estimate(
    request: Request,
    body: Body,
    settings: NarrowedSettings,
    stopping: StoppingOf,
    asks: CallerOf,
    budget: BudgetOf,
) -> Estimate:
    """Estimate what a job would need without running it; refuse one that the data folder cannot hold."""
    from service.plan.estimate import estimate_request  # imports pyarrow

    def watch() -> None:
        if stopping() or from_thread.run(request.is_disconnected):
            raise HTTPException(503, "the estimate was stopped")

    with budget.taking(asks.owner, Taken.ESTIMATES):
        needs = await run_in_threadpool(estimate_request, body.request, settings, watch, body.document)
    check_fits(body.request, needs, settings)
    return needs
