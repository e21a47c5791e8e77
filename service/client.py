"""Talks to a running service over HTTP, for the command line and for who reads a job while it runs."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from pydantic import ValidationError

from schemas.job import PROBLEM_MEDIA_TYPE, RESTING_JOB_STATES, JobSummary, Problem

TIMEOUT_S = 30.0
KEPT_S = 3.0
"""That a silent connection is used again; the service closes it after five."""
POLL_S = 1.0
MAX_UNANSWERED = 5
UNREACHABLE = "urn:quarry:server-unreachable"


class ProblemReceived(Exception):
    """The service answered with a problem, or not at all."""

    def __init__(self, problem: Problem) -> None:
        """Carry what the service said."""
        super().__init__(problem.detail)
        self.problem = problem


class Client(httpx2.Client):
    """One service. Proxies of the environment are not used. The methods below raise ProblemReceived."""

    def __init__(self, server: str, key: str | None = None) -> None:
        """Prepare for the service at base URL `server`; connects at the first call.

        An API key that is not given is that of QUARRY_KEY, or in the file that QUARRY_KEY_FILE names. Raises
        OSError.
        """
        file = os.environ.get("QUARRY_KEY_FILE") if key is None else None
        key = os.environ.get("QUARRY_KEY", "") if key is None else key
        if file:
            key = Path(file).read_text().strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(keepalive_expiry=KEPT_S)
        super().__init__(base_url=server, headers=headers, timeout=TIMEOUT_S, limits=limits, trust_env=False)

    def call(
        self,
        method: str,
        path: str,
        query: dict[str, str | int | None] | None = None,
        body: object = None,
    ) -> Any:  # noqa: ANN401 - a parsed JSON document
        """Return the answer. Options of the query that have no value are not sent."""
        given = {name: value for name, value in (query or {}).items() if value is not None}
        response = self.answer(method, path, params=given, json=body)
        return response.json() if response.content else None

    def answer(self, method: str, path: str, **options: Any) -> httpx2.Response:  # noqa: ANN401 - httpx2's
        """Return a good answer, with its whole body."""
        try:
            response = self.request(method, path, **options)
        except httpx2.TransportError as error:
            raise ProblemReceived(self._unreachable(error)) from error
        if not response.is_success:
            raise ProblemReceived(_problem(response))
        return response

    def job(self, method: str, path: str, body: dict[str, int] | None = None) -> JobSummary:
        """Return the job that is the answer."""
        return JobSummary.model_validate(self.call(method, path, body=body))

    def follow(self, job_id: str) -> Iterator[JobSummary]:
        """Yield a job every second until it rests; waits for a service that restarts."""
        unanswered = MAX_UNANSWERED  # until it has answered once
        while True:
            try:
                job = self.job("GET", f"/jobs/{job_id}")
            except ProblemReceived as error:
                unanswered += 1
                if error.problem.type != UNREACHABLE or unanswered > MAX_UNANSWERED:
                    raise
            else:
                unanswered = 0
                yield job
                if job.state in RESTING_JOB_STATES:
                    return
            time.sleep(POLL_S)

    def _unreachable(self, error: Exception) -> Problem:
        return Problem(
            type=UNREACHABLE,
            title="The service does not answer",
            status=503,
            detail=f"{self.base_url}: {error}",
            cure="start it with 'quarry serve', or name another with --server",
        )


def _problem(response: httpx2.Response) -> Problem:
    """Return the problem in `response`, or one that says what else it was: a proxy may have answered."""
    if response.headers.get("content-type", "").startswith(PROBLEM_MEDIA_TYPE):
        try:
            return Problem.model_validate_json(response.content)
        except ValidationError:
            pass  # said below
    return Problem(
        type="urn:quarry:unexpected-answer",
        title="The answer is not from Quarry",
        status=response.status_code,
        detail=f"{response.request.url} answered {response.status_code} {response.reason_phrase}",
        cure="check --server",
    )
