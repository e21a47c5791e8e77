"""Webhooks: the caller's secret, and redelivery of a report."""

from fastapi import APIRouter, Security

from schemas.job import JobSummary
from schemas.keys import Scope
from schemas.webhook import WebhookSecret
from service.api.auth import caller
from service.api.json_route import JsonRoute
from service.api.problems import problem_responses
from service.api.routes.options import NO_OPTIONS, NO_QUERY
from service.api.routes.resources import CallerOf, JobOf, SettingsOf, StoreOf
from service.control.webhooks import secret
from service.store import webhooks

router = APIRouter(
    tags=["jobs"],
    dependencies=[Security(caller, scopes=[Scope.JOBS_WRITE])],
    responses=problem_responses(401, 403, 422, 429),
    route_class=JsonRoute,
)


@router.get("/webhooks/secret", dependencies=NO_QUERY)
def read_secret(asks: CallerOf, settings: SettingsOf) -> WebhookSecret:
    """Return the secret that signs the webhooks of the caller's jobs, in the form of Standard Webhooks."""
    return WebhookSecret(secret=secret(asks.owner, settings))


@router.post(
    "/jobs/{job_id}/webhook",
    status_code=202,
    dependencies=NO_OPTIONS,
    responses=problem_responses(404, 409, 415),
)
def redeliver(job: JobOf, store: StoreOf) -> JobSummary:
    """Send the job's last report again, with the same `webhook-id`."""
    return store.write(webhooks.again, job.id).view()
