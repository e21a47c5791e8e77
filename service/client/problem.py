"""The problems a service answers with, and those reported when it does not answer properly or at all."""

from contextlib import suppress
from http import HTTPStatus

import httpx2
from pydantic import ValidationError

from schemas.base import first_fault
from schemas.job import PROBLEM_MEDIA_TYPE, Problem

UNREACHABLE, UNEXPECTED = "urn:quarry:server-unreachable", "urn:quarry:unexpected-answer"


class ProblemReceived(Exception):
    """The service answered with a problem, answered unexpectedly, or did not answer."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    @property
    def is_passing(self) -> bool:
        """Whether the same call may succeed later: the service is away or fails, or a limit is reached."""
        return self.problem.status == HTTPStatus.TOO_MANY_REQUESTS or self.problem.status >= 500


def unreachable(server: str, error: Exception) -> ProblemReceived:
    """Return the problem for a service that does not answer."""
    title, cure = "The service does not answer", "start it with 'quarry serve', or name another with --server"
    detail = f"{server}: {error}"
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        title = "The server's certificate is not trusted"
        cure = "renew or replace the certificate, or name the authority that issued it in SSL_CERT_FILE"
    return ProblemReceived(Problem(type=UNREACHABLE, title=title, status=503, detail=detail, cure=cure))


def refused(response: httpx2.Response) -> ProblemReceived:
    """Return the problem in `response`, or one that describes the answer: a proxy may have sent it."""
    if response.headers.get("content-type", "").startswith(PROBLEM_MEDIA_TYPE):
        with suppress(ValidationError):  # reported below
            return ProblemReceived(Problem.answered(response.content))
    return not_quarrys(response, f"{response.status_code} {response.reason_phrase}")


def unreadable(response: httpx2.Response, error: ValidationError) -> ProblemReceived:
    """Return the problem for a successful answer that this version cannot parse."""
    sent = repr(error.errors(include_url=False)[0]["input"])
    return not_quarrys(response, f"{first_fault(error)}; it sent {sent[:100]}")


def not_quarrys(response: httpx2.Response, what: str) -> ProblemReceived:
    """Return the problem for an answer that no Quarry of this version gives."""
    title = "The answer is not from Quarry"
    cure = "check --server; if that service is newer, update this client"
    status = response.status_code if response.is_error else 502
    detail = f"{response.request.url} answered {what}"
    return ProblemReceived(Problem(type=UNEXPECTED, title=title, status=status, detail=detail, cure=cure))
