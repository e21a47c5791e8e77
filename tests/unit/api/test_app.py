"""The application's public description: every operation is explained, and every error is a problem."""

from pathlib import Path

import pytest

from service.api.app import create_app
from service.api.problems import PROBLEM_MEDIA_TYPE
from tests.support.api import api_settings


@pytest.fixture
def openapi(tmp_path: Path) -> dict:
    return create_app(api_settings(tmp_path)).openapi()


def operations(openapi: dict) -> dict[tuple[str, str], dict]:
    return {(method, path): one for path, item in openapi["paths"].items() for method, one in item.items()}


def test_every_operation_is_named_and_explained(openapi: dict):
    described = operations(openapi).values()
    assert len({one["operationId"] for one in described}) == len(described)
    assert all(one["description"] for one in described)


def test_every_error_of_every_route_is_described_as_a_problem(openapi: dict):
    for route, operation in operations(openapi).items():
        statuses = [status for status in operation["responses"] if int(status) >= 400]
        assert "422" in statuses, route
        for status in statuses:
            assert list(operation["responses"][status]["content"]) == [PROBLEM_MEDIA_TYPE], (route, status)


def test_the_schemas_that_routes_refer_to_by_hand_are_there(openapi: dict):
    assert {"ExtractRequest", "Problem"} <= openapi["components"]["schemas"].keys()
    assert openapi["paths"]["/extract"]["post"]["requestBody"]["required"] is True
