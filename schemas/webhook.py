"""Webhooks: where a job's end is reported, and what is sent, following Standard Webhooks."""

from datetime import datetime
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, StringConstraints

from schemas.base import Wire
from schemas.job import JobState, JobSummary

REPORTED_JOB_STATES = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.BLOCKED})
"""States that a webhook reports: the final ones, and BLOCKED, which waits for a person."""


def _https(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme == "https" and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # as resolvers do
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from error
    if not is_good or parts.username is not None or parts.fragment:
        raise ValueError("expected https://HOST/PATH without a user and without a fragment")
    return url


class Webhook(Wire):
    """A URL that receives a signed `POST` when the job ends or is blocked."""

    url: Annotated[str, StringConstraints(max_length=2048, pattern=r"^[!-~]+$"), AfterValidator(_https)]


class WebhookBody(Wire):
    """The body of a report: the job as it was at that moment."""

    type: Literal["job.completed", "job.failed", "job.cancelled", "job.blocked"]
    timestamp: datetime
    data: JobSummary


class WebhookSecret(Wire):
    """The answer of `GET /webhooks/secret`: the secret that signs the caller's webhooks."""

    secret: str
