"""The application's public description: every route and every error is in it, and it does not move."""

from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from service.api.app import create_app
from service.api.problems import PROBLEM_MEDIA_TYPE
from tests.support.api import api_settings

CONTRACT = {
    ("post", "/extract"): 202,
    ("post", "/estimate"): 200,
    ("get", "/jobs"): 200,
    ("get", "/jobs/{job_id}"): 200,
    ("patch", "/jobs/{job_id}"): 200,
    ("delete", "/jobs/{job_id}"): 204,
    ("get", "/jobs/{job_id}/request"): 200,
    ("post", "/jobs/{job_id}/pause"): 200,
    ("post", "/jobs/{job_id}/cancel"): 200,
    ("post", "/jobs/{job_id}/resume"): 200,
    ("get", "/jobs/{job_id}/events"): 200,
    ("get", "/jobs/{job_id}/shards"): 200,
    ("get", "/jobs/{job_id}/manifest"): 200,
    ("get", "/jobs/{job_id}/rejects"): 200,
    ("get", "/healthz"): 200,
    ("get", "/readyz"): 200,
    ("get", "/metrics"): 200,
}


@pytest.fixture
def openapi(tmp_path: Path) -> dict:
    return create_app(api_settings(tmp_path)).openapi()


def operations(openapi: dict) -> dict[tuple[str, str], dict]:
    return {(method, path): one for path, item in openapi["paths"].items() for method, one in item.items()}


def test_the_description_names_exactly_the_routes_of_the_contract(tmp_path: Path, openapi: dict):
    described = operations(openapi)
    assert described.keys() == CONTRACT.keys()
    for route, status in CONTRACT.items():
        assert str(status) in described[route]["responses"]
    app = create_app(api_settings(tmp_path))
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert {(method.lower(), route.path) for route in routes for method in route.methods} == CONTRACT.keys()
    assert app.openapi() == openapi


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


def test_every_schema_that_is_referred_to_is_there(openapi: dict):
    def references(node: object) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*map(references, node.values()))
        return set().union(*map(references, node)) if isinstance(node, list) else set()

    schemas = openapi["components"]["schemas"]
    assert references(openapi) <= {f"#/components/schemas/{name}" for name in schemas}
    assert openapi["paths"]["/extract"]["post"]["requestBody"]["required"] is True
    assert schemas["ExtractRequest"]["additionalProperties"] is False
