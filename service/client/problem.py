"""What a service answers when it refuses, and what is said where it does not answer at all."""

import httpx2
from pydantic import ValidationError

from schemas.base import first_fault
from schemas.job import PROBLEM_MEDIA_TYPE, Problem

UNREACHABLE = "urn:quarry:server-unreachable"


class ProblemReceived(Exception):
    """The service answered with a problem, or not at all."""

    def __init__(self, problem: Problem) -> None:
        """Carry what the service said."""
        super().__init__(problem.detail)
        self.problem = problem


def unreachable(server: str, error: Exception) -> ProblemReceived:
    """Return the problem of a service that does not answer."""
    return ProblemReceived(
        Problem(
            type=UNREACHABLE,
            title="The service does not answer",
            status=503,
            detail=f"{server}: {error}",
            cure="start it with 'quarry serve', or name another with --server",
        )
    )


def bad_key() -> ProblemReceived:
    """Return the problem of a key that no header can hold; it is not quoted."""
    return ProblemReceived(
        Problem(
            type="urn:quarry:key-refused",
            title="A key is needed",
            status=401,
            detail="the API key is not one word of printable ASCII characters, so it is not sent",
            cure="give the key alone, in QUARRY_KEY or the file of QUARRY_KEY_FILE",
        )
    )


def refused(response: httpx2.Response) -> ProblemReceived:
    """Return the problem in `response`, or one that says what else it was: a proxy may have answered."""
    if response.headers.get("content-type", "").startswith(PROBLEM_MEDIA_TYPE):
        try:
            return ProblemReceived(Problem.model_validate_json(response.content, extra="ignore"))
        except ValidationError:
            pass  # said below
    return not_quarrys(response, f"{response.status_code} {response.reason_phrase}")


def unreadable(response: httpx2.Response, error: ValidationError) -> ProblemReceived:
    """Return the problem of a good answer that is not of the form that this version knows."""
    return not_quarrys(response, first_fault(error))


def not_quarrys(response: httpx2.Response, what: str) -> ProblemReceived:
    """Return the problem of an answer that no Quarry of this version gives."""
    return ProblemReceived(
        Problem(
            type="urn:quarry:unexpected-answer",
            title="The answer is not from Quarry",
            status=response.status_code if response.is_error else 502,
            detail=f"{response.request.url} answered {what}",
            cure="check --server; if that service is newer, update this client",
        )
    )
