"""Talks to a running service over HTTP, for `quarry jobs`."""

import time
from collections.abc import Iterator
from typing import Any, Self

import httpx2
from pydantic import ValidationError

from schemas.events import Event
from schemas.job import RESTING_JOB_STATES, JobSummary, Problem
from service.api.problems import PROBLEM_MEDIA_TYPE

TIMEOUT_S = 30.0
SILENCE_S = 60.0
"""An idle event stream carries a comment every 15 seconds; one that is silent for this long is dead."""
MAX_LOST_STREAMS = 5
RECONNECT_S = 1.0


class ProblemReceived(Exception):
    """The service answered with a problem, or not at all."""

    def __init__(self, problem: Problem) -> None:
        """Carry what the service said."""
        super().__init__(problem.detail)
        self.problem = problem


class Client:
    """One service. Proxies of the environment are not used. Every verb raises ProblemReceived."""

    def __init__(self, server: str) -> None:
        """Prepare for the service at base URL `server`; connects at the first call."""
        self._server = server
        self._http = httpx2.Client(base_url=server, timeout=TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Self:
        """Return the client; its connections end with the block."""
        return self

    def __exit__(self, *_raised: object) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **query: str | int | None) -> Any:  # noqa: ANN401 - a parsed JSON document
        """Return what `path` answers; options without a value are not sent."""
        return self._json("GET", path, {name: value for name, value in query.items() if value is not None})

    def post(self, path: str) -> Any:  # noqa: ANN401 - a parsed JSON document
        """Post without a body and return the answer."""
        return self._json("POST", path, {})

    def patch(self, path: str, body: dict[str, int]) -> Any:  # noqa: ANN401 - a parsed JSON document
        """Send what is to be changed and return the answer."""
        return self._json("PATCH", path, {}, body)

    def delete(self, path: str, **query: str) -> None:
        """Delete what is at `path`."""
        self._json("DELETE", path, dict(query))

    def follow(self, job_id: str) -> Iterator[Event]:
        """Yield a job's events from the first until no worker goes on with it; a lost stream is resumed."""
        state, last, lost = JobSummary.model_validate(self.get(f"/jobs/{job_id}")).state, 0, 0
        while True:
            try:
                for event in self._stream(job_id, last):
                    state, last, lost = event.state, event.id, 0
                    yield event
            except httpx2.TransportError as error:
                lost += 1
                if lost > MAX_LOST_STREAMS:
                    raise ProblemReceived(self._unreachable(error)) from error
                time.sleep(RECONNECT_S)
                continue
            if state in RESTING_JOB_STATES:
                return

    def _stream(self, job_id: str, last: int) -> Iterator[Event]:
        headers, path = {"Last-Event-ID": str(last)}, f"/jobs/{job_id}/events"
        with self._http.stream("GET", path, headers=headers, timeout=SILENCE_S) as response:
            if response.status_code != 200:
                response.read()
                raise ProblemReceived(_problem(response))
            for line in response.iter_lines():
                if line.startswith("data:"):
                    yield Event.model_validate_json(line.removeprefix("data:"))

    def _json(
        self, method: str, path: str, query: dict[str, str | int], body: dict[str, int] | None = None
    ) -> Any:  # noqa: ANN401 - a parsed JSON document
        try:
            response = self._http.request(method, path, params=query, json=body)
        except httpx2.TransportError as error:
            raise ProblemReceived(self._unreachable(error)) from error
        if response.is_success:
            return response.json() if response.content else None
        raise ProblemReceived(_problem(response))

    def _unreachable(self, error: Exception) -> Problem:
        return Problem(
            type="urn:quarry:server-unreachable",
            title="The service does not answer",
            status=503,
            detail=f"{self._server}: {error}",
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
        title="Not an answer of Quarry",
        status=response.status_code,
        detail=f"{response.request.url} answered {response.status_code} {response.reason_phrase}",
        cure="check --server",
    )
