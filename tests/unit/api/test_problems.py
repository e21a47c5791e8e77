"""Every error class leaves as its own problem document, and an unknown error says nothing of its cause."""

import logging
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, HTTPException
from starlette.testclient import TestClient

from schemas.job import Problem
from service import errors
from service.api import problems
from service.api.problems import PROBLEM_MEDIA_TYPE
from service.errors import QuarryError

SECRET = "postgresql://user:secret@host/name"


def family(root: type[QuarryError]) -> Iterator[type[QuarryError]]:
    yield root
    for child in root.__subclasses__():
        yield from family(child)


FAMILY = [kind for kind in family(QuarryError) if kind.__module__ == errors.__name__]


def client_raising(error: Exception) -> TestClient:
    app = FastAPI()
    problems.install(app)

    @app.get("/")
    def fail() -> None:
        raise error

    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("kind", FAMILY)
def test_an_error_class_answers_with_its_status_its_type_and_its_three_parts(kind: type[QuarryError]):
    error = kind("what is wrong", field="source.path", cure="mend it")
    response = client_raising(error).get("/")
    assert response.status_code == kind.status
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    assert Problem.model_validate_json(response.content) == error.problem()


def test_a_part_that_an_error_does_not_have_is_left_out_and_its_cure_is_the_usual_one():
    response = client_raising(errors.NotFound("no such job")).get("/")
    assert set(response.json()) == {"type", "title", "status", "detail", "cure"}
    assert response.json()["cure"] == errors.NotFound.usual_cure


def test_no_request_is_told_that_it_is_retried():
    assert "repeat" in client_raising(errors.HubUnavailable("no answer")).get("/").json()["cure"]


@pytest.mark.parametrize("kind", FAMILY)
def test_a_failure_of_the_service_and_nothing_else_is_logged_with_its_traceback(
    kind: type[QuarryError], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.DEBUG, logger=problems.LOG.name):
        client_raising(kind("what is wrong")).get("/")
    logged = [one.exc_info[0] for one in caplog.records if one.name == problems.LOG.name and one.exc_info]
    is_logged = kind.status >= 500 and not issubclass(kind, errors.HubUnavailable)
    assert logged == ([kind] if is_logged else [])


def test_an_unknown_error_tells_nothing_of_its_cause():
    response = client_raising(RuntimeError(SECRET)).get("/")
    problem = Problem.model_validate_json(response.content)
    assert (response.status_code, problem.type) == (500, "urn:quarry:internal-error")
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    assert "secret" not in response.text
    assert "RuntimeError" not in response.text


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 418, 429, 500, 503])
def test_a_plain_http_error_is_a_problem_and_keeps_its_headers(status: int):
    response = client_raising(HTTPException(status, "why", headers={"Retry-After": "3"})).get("/")
    problem = Problem.model_validate_json(response.content)
    assert (response.status_code, problem.status, problem.detail) == (status, status, "why")
    assert response.headers["retry-after"] == "3"
    assert problem.type.startswith("urn:quarry:")


@pytest.mark.parametrize("path", ["/jobs/", "/nowhere"])
def test_a_path_of_no_route_says_where_the_routes_are(path: str):
    problem = Problem.model_validate_json(client_raising(RuntimeError()).get(path).content)
    assert (problem.status, "/openapi.json" in str(problem.cure)) == (404, True)


@pytest.mark.parametrize("status", [404, 405, 413, 415, 416, 429, 500, 503])
def test_an_http_error_that_the_service_gives_has_a_cure(status: int):
    assert problems.http_problem(status, "why").cure
