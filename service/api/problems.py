"""Turns every error of a route into an RFC 9457 `application/problem+json` document."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from schemas.job import PROBLEM_MEDIA_TYPE, Problem
from service.control.request_body import invalid
from service.errors import HubUnavailable, QuarryError, RequestError

LOG = logging.getLogger(__name__)

HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "10"},
    503: {"Retry-After": "10"},
    507: {"Retry-After": "60"},
}
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
"""Others are refused before the metrics count them by name."""
_TITLES = {413: "Content too large", 500: "Internal error"}
_CURES = {
    404: "check the path: /openapi.json lists the routes",
    405: "use one of the methods in the Allow header",
    413: "send less at once, read the samples from a file or the Hub, or raise QUARRY_MAX_BODY_BYTES",
    416: "ask for bytes that the file has, or leave the Range header out",
    429: "send it again after the seconds that the Retry-After header says",
    415: "send the body as JSON with 'Content-Type: application/json'",
    500: "look for the traceback in the log of the service, and report it",
    503: "send it again after the seconds that the Retry-After header says",
}


def _title(status: int) -> str:
    return _TITLES.get(status, HTTPStatus(status).phrase.capitalize())


def http_problem(status: int, detail: str) -> Problem:
    """Return the document of a plain HTTP error; `type` is the title in kebab case."""
    title = _title(status)
    return Problem(
        type=f"urn:quarry:{title.lower().replace(' ', '-')}",
        title=title,
        status=status,
        detail=detail,
        cure=_CURES.get(status),
    )


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Return `problem` as a response; members without a value are left out."""
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=problem.status,
        headers={**HEADERS.get(problem.status, {}), **(headers or {})},
        media_type=PROBLEM_MEDIA_TYPE,
    )


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of a route that may answer with problems of `statuses`."""
    content = {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {s: {"description": _title(s), "content": content} for s in statuses}


def install(app: FastAPI) -> None:
    """Add the handlers, so that every error leaves `app` in this form."""
    app.add_exception_handler(QuarryError, _quarry_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, _unexpected)


async def _quarry_error(request: Request, error: Exception) -> Response:
    return problem_response(noted(request, cast(QuarryError, error)))


def noted(request: Request, error: QuarryError) -> Problem:
    """Return an error's document; log it if it is a server error."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        # The Hub's answer may quote the token that was sent to it.
        ours = None if isinstance(error, HubUnavailable) else error
        LOG.error("%s %s failed: %s", request.method, request.url.path, error.detail, exc_info=ours)
    return error.problem()


async def _invalid_parameters(request: Request, error: Exception) -> Response:
    return problem_response(invalid_parameters(cast(RequestValidationError, error)).problem())


def invalid_parameters(error: RequestValidationError) -> RequestError:
    """Return the error that names the first invalid parameter and lists all.

    The first part of a fault's path, such as `query`, is where the parameter was sent; it is left out, unless
    the whole body is missing.
    """

    def field(fault: Any) -> str | None:  # noqa: ANN401 - pydantic's
        place, *path = map(str, fault["loc"])
        return ".".join(path) or (place if fault["type"] == "missing" else None)

    return invalid([(field(fault), fault) for fault in error.errors()])


async def _http_error(request: Request, error: Exception) -> Response:
    error = cast(HTTPException, error)
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework names those of one route.
        headers = {**(headers or {}), "Allow": ", ".join(_methods_of(request))}
    return problem_response(http_problem(error.status_code, error.detail), headers)


def _methods_of(request: Request) -> list[str]:
    """Return the methods that some route takes at a request's path."""
    asked = ({**request.scope, "method": method} for method in METHODS)
    routes = request.app.routes
    return [one["method"] for one in asked if any(route.matches(one)[0] is Match.FULL for route in routes)]


async def _disconnected(request: Request, error: Exception) -> Response:
    """The client left in the middle of its request: nobody reads this answer."""
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answer without naming the cause; Starlette re-raises `error`, and the server logs its traceback."""
    return problem_response(
        http_problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the service failed; its log says why")
    )
