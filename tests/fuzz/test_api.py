"""Requests made of the OpenAPI document, and of it broken: no answer is 500, and each is a documented one.

`FUZZ_EXAMPLES` is how many of each route and kind; `make fuzz` sets it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.api import api_settings, job_body, serving, small_target
from tests.support.fake_hub import FakeHub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5"))
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
PASSING = frozenset({503, 507})
"""They say when to come again."""
ADMIN = "a" * 40
LEFT_OUT = {"GET /jobs/{job_id}/events", "DELETE /schedules/{name}", "POST /keys"}
"""A stream ends when its job rests, and here no worker runs one; the others would end the play."""


class Caller:
    """Sends cases to a service; keeps the answers' statuses, and the ids of what was made."""

    def __init__(self, client: httpx2.Client, headers: dict[str, str], model: Path) -> None:
        self.client, self.model = client, model
        self._headers = headers
        self.statuses: Counter[int] = Counter()
        self._made: dict[str, list[str]] = {"job_id": [], "name": [], "key_id": []}
        self._begin()

    def _begin(self) -> None:
        """Make what most requests are about: they seldom make one themselves."""
        for number in range(5):
            headers = self._headers | {"Idempotency-Key": str(number)}
            made = self.client.post("/extract", json=job_body(self.model), headers=headers)
            if made.status_code == 202:
                self._made["job_id"].append(made.json()["id"])
        source = {"kind": "file", "path": str(self.model.parent / "*.jsonl")}
        nightly = {"name": "nightly", "cron": "0 3 * * *", "request": job_body(self.model, source=source)}
        if self.client.post("/schedules", json=nightly, headers=self._headers).status_code == 201:
            self._made["name"].append("nightly")

    def send(self, case: schemathesis.Case, known: float) -> None:
        """Send a case and check its answer.

        A body that names a model gets one that is there; `known` picks one of what earlier cases have made,
        to stand for the id in the path, or none of it below 0.
        """
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = str(self.model)
        for name, made in self._made.items():
            if known >= 0 and made and name in (case.path_parameters or {}):
                case.path_parameters[name] = made[int(known * len(made))]
        if isinstance(case.query, dict) and len(str(case.query.get("wait", "none at all"))) < 9:
            case.query["wait"] = 0  # no worker runs here: the answer would come after up to a minute
        answer = case.call(base_url=str(self.client.base_url), headers=self._headers)
        self.statuses[answer.status_code] += 1
        if answer.status_code in PASSING:
            assert int(answer.headers["retry-after"][0]) > 0
        else:
            assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=CHECKS)
        if case.method == "POST" and answer.status_code in (201, 202):
            document = answer.json()
            for name, field in (("job_id", "id"), ("name", "name"), ("key_id", "id")):
                if field in document:
                    self._made[name].append(document[field])


@pytest.fixture(scope="module", params=["no key", "a key", "a wrong key"])
def caller(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "admin").write_text(ADMIN)
    (folder / "rows.jsonl").write_text('{"text": "x"}\n')
    keyed = {} if request.param == "no key" else {"admin_key_file": folder / "admin"}
    headers = {"no key": {}, "a key": {"Authorization": f"Bearer {ADMIN}"}}.get(
        request.param, {"Authorization": f"Bearer qk_00000000_{'x' * 43}"}
    )
    with FakeHub() as hub, serving(api_settings(folder, hub_endpoint=hub.url, **keyed)) as client:
        yield Caller(client, headers, small_target(folder / "model"))


def test_every_answer_is_a_documented_one(caller: Caller) -> None:
    schema = schemathesis.openapi.from_dict(caller.client.get("/openapi.json").json())
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.label in LEFT_OUT:
            continue
        for mode in GenerationMode:
            with suppress(Unsatisfiable):  # nothing of a request without options can be broken
                _probe(caller, operation, mode)
    print(dict(sorted(caller.statuses.items())), sum(caller.statuses.values()), "requests")


def _probe(caller: Caller, operation: Any, mode: GenerationMode) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode), known=st.floats(-1.0, 1.0, exclude_max=True))
    def probe(case: schemathesis.Case, known: float) -> None:
        caller.send(case, known)

    probe()
