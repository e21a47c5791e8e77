"""Checks each request's API key: `Security(caller, scopes=[...])` on a route."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.concurrency import run_in_threadpool

from schemas.keys import Scope
from service.api.routes.resources import BudgetOf, SettingsOf, StoreOf
from service.control.budget import Budget, Taken
from service.control.keys import Caller, authenticate
from service.errors import CallerRefused

LASTING = {
    "/jobs/{job_id}/events": Taken.STREAMS,
    "/jobs/{job_id}/units": Taken.STREAMS,
    "/jobs/{job_id}/manifest": Taken.DOWNLOADS,
    "/jobs/{job_id}/files/{path:path}": Taken.DOWNLOADS,
    "/ui/events": Taken.STREAMS,
    "/ui/jobs/{job_id}/samples/{unit}/{row}": Taken.DOWNLOADS,
}
"""What long-lived requests count as in the budget, by route; all others count as `Taken.REQUESTS`."""
BEARER = HTTPBearer(auto_error=False, description="an API key, `qk_...`; none is needed on the loopback")


async def caller(
    request: Request,
    required: SecurityScopes,
    given: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    store: StoreOf,
    settings: SettingsOf,
    budget: BudgetOf,
) -> AsyncIterator[Caller]:
    """Yield the caller, if the key has all required scopes; the request is in the budget until answered.

    Raises KeyRefused, CallerRefused, QuotaExceeded.
    """
    ask = partial(authenticate, store, settings, given.credentials if given else None)
    async with admitted(request, required, ask, budget) as sender:
        yield sender


@asynccontextmanager
async def admitted(
    request: Request, required: SecurityScopes, ask: Callable[[], Caller], budget: Budget
) -> AsyncIterator[Caller]:
    """Yield the caller that `ask` returns, if their key has all required scopes.

    Raises what `ask` raises, CallerRefused, QuotaExceeded.
    """
    sender = await run_in_threadpool(ask)
    request.state.caller, request.state.ask_again = sender, ask
    for scope in required.scopes:
        if not sender.may(Scope(scope)):
            cure = "ask an admin for a key with that scope"
            raise CallerRefused(f"the key has no scope {str(scope)!r}", field="Authorization", cure=cure)
    if sender.owner is not None and sender.grants.requests_per_minute is not None:
        budget.count_request(sender.owner, sender.grants.requests_per_minute)
    with budget.taking(sender.owner, LASTING.get(request.scope["route"].path, Taken.REQUESTS)):
        yield sender
