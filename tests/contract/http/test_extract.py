"""POST /extract and /estimate: what becomes a job, what is the same job, what is refused by field."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from schemas.job import JobState, JobSummary
from schemas.request import ExtractRequest
from service.api.gate import SMALL_BODY_BYTES
from service.api.routes import extract
from service.control.request_body import weight
from service.store import Store, jobs
from tests.support.api import JSON, UNKNOWN, api_settings, job_body, problem_of, serving
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.tiny_model import random_target


def test_an_accepted_job_is_queued_and_can_be_read_where_the_answer_says(api: httpx2.Client, model: Path):
    response = api.post("/extract", json=job_body(model))
    assert response.status_code == 202
    view = JobSummary.model_validate(response.json())
    assert view.state is JobState.QUEUED
    assert view.model == str(model)
    request = api.get(f"{response.headers['location']}/request")
    assert request.json() == ExtractRequest.model_validate(job_body(model)).model_dump(mode="json")
    assert response.headers["location"] == f"/jobs/{view.id}"
    assert api.get(response.headers["location"]).json() == response.json()


def test_a_key_is_one_job_whatever_becomes_of_its_source_and_no_other(api: httpx2.Client, model: Path):
    """1. A job is made. 2. Its source is deleted: the same post finds it. 3. Another body is a conflict."""
    source = model.parent / "once.jsonl"
    source.write_text('{"text": "hello"}\n')
    body = job_body(model, source={"kind": "file", "path": str(source)})
    key = {"Idempotency-Key": "nightly 2026-01-01"}
    first = api.post("/extract", json=body, headers=key)
    source.unlink()
    again = api.post("/extract", json=body, headers=key)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    problem = problem_of(api.post("/extract", json=body | {"loss": "last_turn"}, headers=key), 409)
    assert (problem.type, problem.field) == ("urn:quarry:idempotency-conflict", "Idempotency-Key")
    assert problem_of(api.post("/extract", json=body), 422).type == "urn:quarry:source-refused"


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "caf\u00e9"])
def test_a_key_that_is_not_short_printable_ascii_is_refused(api: httpx2.Client, model: Path, key: str):
    headers = {"Idempotency-Key": key.encode("latin-1")}
    response = api.post("/extract", json=job_body(model), headers=headers)
    assert problem_of(response, 422).field == "idempotency-key"


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"model": "/nowhere/at/all"}, "unknown-model", "model"),
        ({"model": "not a model id"}, "unknown-model", "model"),
        ({"layers": [99]}, "unknown-layer", "layers"),
        ({"chat_template": "{% if x %}"}, "template-refused", "chat_template"),
        ({"source": {"kind": "file", "path": "/etc/hostname"}}, "source-refused", "source.path"),
        ({"source": {"kind": "file", "path": "missing.jsonl"}}, "source-refused", "source.path"),
        ({"source": {"kind": "file", "path": "nul\0.jsonl"}}, "request-error", "source.path"),
        ({"source": {"kind": "file", "path": "a.jsonl", "limit": 2**63}}, "request-error", "source.limit"),
        ({"model": "./nul\0"}, "request-error", "model"),
        ({"source": {"kind": "inline", "samples": []}}, "request-error", "source.samples"),
        ({"storage": {"kompression": "none"}}, "request-error", "storage.kompression"),
    ],
)
def test_a_job_that_cannot_run_is_refused_at_once_by_field(
    api: httpx2.Client, store: Store, model: Path, changes: dict[str, Any], kind: str, field: str
):
    before = sum(store.read(jobs.counts).values())
    problem = problem_of(api.post("/extract", json=job_body(model) | changes), 422)
    assert (problem.type, problem.field) == (f"urn:quarry:{kind}", field)
    assert problem.cure is not None or kind == "request-error"
    assert sum(store.read(jobs.counts).values()) == before


@pytest.mark.parametrize("raw", [b"", b"[]", b"[" * 3_000, b"\xff", b"null"])
def test_bytes_that_are_no_job_are_refused_and_never_an_internal_error(api: httpx2.Client, raw: bytes):
    for path in ("/extract", "/estimate"):
        problem_of(api.post(path, content=raw, headers=JSON), 422)


def test_a_deep_document_inside_a_tool_is_refused_or_kept_but_never_an_internal_error(
    api: httpx2.Client, model: Path
):
    for depth in (50, 150, 190, 1400):
        tool = b'{"a":' * depth + b"1" + b"}" * depth
        sample = b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + tool + b"]}"
        source = b'{"kind": "inline", "samples": [' + sample + b"]}"
        raw = json.dumps(job_body(model, source=0)).encode().replace(b'"source": 0', b'"source": ' + source)
        response = api.post("/extract", content=raw, headers=JSON)
        assert response.status_code in {202, 422}, (depth, response.text)
        if response.status_code == 202:
            assert api.get(response.headers["location"]).json() == response.json()


def test_only_json_is_taken_so_that_a_page_of_another_origin_cannot_post(api: httpx2.Client, model: Path):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        raw = json.dumps(job_body(model)).encode()
        problem_of(api.post("/extract", content=raw, headers={"Content-Type": kind}), 415)
    problem_of(api.post("/extract", content=raw), 415)


def test_a_body_beyond_the_limit_is_refused_whether_it_says_its_length_or_not(
    api: httpx2.Client, store: Store
):
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 10_000

    before = sum(store.read(jobs.counts).values())
    refused = [problem_of(api.post("/extract", content=chunks(), headers=JSON), 413)]
    for path, limit_bytes in (("/extract", 100_000), (f"/jobs/{UNKNOWN}/cancel", SMALL_BODY_BYTES)):
        refused.append(problem_of(api.post(path, content=b" " * (limit_bytes + 1), headers=JSON), 413))
    assert {problem.type for problem in refused} == {"urn:quarry:content-too-large"}
    assert all("send less at once" in str(problem.cure) for problem in refused), "also at other routes"
    assert sum(store.read(jobs.counts).values()) == before


BOMBS = {
    "objects": b'"tools": [{"a": [' + b",".join([b"{}"] * 10_000) + b"]}]",
    "nested lists": b'"tools": [{"a": [' + b",".join([b"[" * 50 + b"]" * 50] * 200) + b"]}]",
    "fields": b'"tools": [{' + b",".join(b'"%x":0' % number for number in range(5_000)) + b"}]",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_body_that_is_small_as_text_and_large_as_objects_is_refused(
    api: httpx2.Client, model: Path, bomb: str
):
    """The limit of these tests is 100,000 bytes."""
    samples = b'[{"messages": [{"role": "user", "content": "x"}], ' + BOMBS[bomb] + b"}]"
    source = b'{"kind": "inline", "samples": ' + samples + b"}"
    raw = json.dumps(job_body(model, source=0)).encode().replace(b'"source": 0', b'"source": ' + source)
    assert len(raw) < 60_000
    for path in ("/extract", "/estimate"):
        problem = problem_of(api.post(path, content=raw, headers=JSON), 413)
        assert "counts as" in problem.detail
        assert problem.cure


@pytest.mark.parametrize(
    "sample",
    [{"text": '{"a": [1, {' * 5000}, {"text": "\\" * 20_000 + '"{' * 5000}, {"token_ids": [7] * 30_000}],
    ids=["text of nodes", "text of quotes and backslashes", "numbers"],
)
def test_a_large_body_of_texts_or_numbers_is_taken(
    api: httpx2.Client, model: Path, sample: dict[str, object]
):
    body = job_body(model, source={"kind": "inline", "samples": [sample]})
    response = api.post("/extract", json=body)
    assert response.status_code == 202, response.text
    kept = api.get(f"{response.headers['location']}/request").json()
    assert kept == ExtractRequest.model_validate(body).model_dump(mode="json")


def test_a_disk_with_too_little_space_takes_nothing_more_and_gives_back_what_it_holds(
    tmp_path: Path, model: Path
):
    """1. A job and a schedule are taken. 2. The floor is above what is free. 3. A job can be deleted."""
    settings = api_settings(tmp_path, model_roots=(model,))
    body, key = job_body(model), {"Idempotency-Key": "before"}
    posted = {"model": str(model), "layers": [1], "source": {"kind": "posted"}}
    nightly = {"name": "nightly", "cron": "0 3 * * *", "request": posted}
    with serving(settings) as api:
        made = api.post("/extract", json=body, headers=key).json()
        assert api.post("/schedules", json=nightly).status_code == 201
    with serving(settings.model_copy(update={"min_free_bytes": 2**60})) as api:
        refused = [
            api.post("/extract", json=body),
            api.post("/schedules", json=nightly | {"name": "other"}),
            api.post("/schedules/nightly/samples", json={"samples": [{"text": "a"}]}),
            api.post("/schedules/nightly/run"),
        ]
        for answer in refused:
            assert problem_of(answer, 507).type == "urn:quarry:disk-full"
            assert int(answer.headers["Retry-After"]) > 0
        assert api.post("/extract", json=body, headers=key).json() == made
        assert api.post(f"/jobs/{made['id']}/cancel").status_code == 200
        assert api.delete(f"/jobs/{made['id']}").status_code == 204


def test_a_repository_without_permission_is_refused_by_field_and_one_with_it_is_taken(
    tmp_path: Path, model: Path
):
    """1. The token may not write there. 2. The same body to a repository where it may is a job."""
    with FakeHub() as hub:
        hub.add_token("hf_token", Token("me"))
        settings = api_settings(tmp_path, model_roots=(model,), hub_endpoint=hub.url, hub_token="hf_token")
        with serving(settings) as api:
            body = job_body(model, hub={"repo_id": "someone/else"})
            problem = problem_of(api.post("/extract", json=body), 403)
            assert (problem.type, problem.field) == ("urn:quarry:hub-denied", "hub.repo_id")
            assert "hf_token" not in problem.model_dump_json()
            assert api.get("/jobs").json()["jobs"] == []
            assert api.post("/extract", json=body | {"hub": {"repo_id": "me/states"}}).status_code == 202


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_unavailable_and_the_same_key_may_be_tried_again(
    tmp_path: Path, model: Path
):
    settings = api_settings(tmp_path, model_roots=(model,), hub_endpoint="http://127.0.0.1:9", hub_token="t")
    with serving(settings) as api:
        key = {"Idempotency-Key": "again"}
        problem_of(api.post("/extract", json=job_body(model, hub={"repo_id": "a/b"}), headers=key), 503)
        assert api.post("/extract", json=job_body(model), headers=key).status_code == 202


def test_a_hub_that_cannot_be_reached_is_told_by_the_kind_of_its_error(tmp_path: Path):
    settings = api_settings(tmp_path, hub_token="hf_one", hub_endpoint="http://127.0.0.1:9")
    with serving(settings) as api:
        problem = problem_of(api.post("/estimate", json=job_body(Path("org/model"))), 503)
        assert problem.detail == "the Hub cannot be reached for model 'org/model': ConnectError"


def test_an_estimate_refuses_what_the_disk_cannot_hold(tmp_path: Path):
    body = job_body(random_target(tmp_path / "target", layers=4, hidden=64))
    settings = api_settings(tmp_path)
    free = shutil.disk_usage(tmp_path).free
    with serving(settings.model_copy(update={"min_free_bytes": 2 * free})) as api:
        problem = problem_of(api.post("/estimate", json=body), 507)
        assert (problem.field, problem.cure is None) == ("storage.keep_local", False)
        leaving = body | {"hub": {"repo_id": "org/states"}, "storage": {"keep_local": False}}
        assert api.post("/estimate", json=leaving).status_code == 200


@pytest.mark.slow
def test_a_large_body_is_read_elsewhere_and_whole(tmp_path: Path):
    samples = [{"id": str(number), "token_ids": [number % 50, number // 50] * 40} for number in range(1000)]
    source = {"kind": "inline", "samples": samples}
    body = job_body(random_target(tmp_path / "target", layers=4, hidden=64), source=source)
    assert len(json.dumps(body)) > SMALL_BODY_BYTES
    with serving(api_settings(tmp_path)) as api:
        assert api.post("/estimate", json=body).json()["samples"] == 1000
        location = api.post("/extract", json=body).headers["location"]
        request = api.get(f"{location}/request").json()
        assert request == ExtractRequest.model_validate(body).model_dump(mode="json")
        body["source"]["samples"][-1]["txt"] = "x"
        assert problem_of(api.post("/extract", json=body), 422).field == "source.samples.999.txt"


@pytest.mark.slow
def test_a_body_that_takes_too_much_memory_is_refused_and_nothing_else(tmp_path: Path):
    samples = [{"id": str(number), "token_ids": [1]} for number in range(60_000)]
    body = job_body(random_target(tmp_path / "target", layers=4, hidden=64))
    with serving(api_settings(tmp_path, plan_memory_bytes=2**24)) as api:
        large = body | {"source": {"kind": "inline", "samples": samples}}
        problem = problem_of(api.post("/extract", json=large), 422)
        assert "exit code" in problem.detail
        assert problem.cure is not None
        assert "QUARRY_PLAN_MEMORY_BYTES" in problem.cure
        assert api.get("/jobs").json()["jobs"] == []


def test_a_small_body_of_many_objects_starts_no_process(
    api: httpx2.Client, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only large ones take turns for that."""
    monkeypatch.setattr(extract, "read_apart", lambda *_: pytest.fail("a process was started"))
    body = job_body(model, source={"kind": "inline", "samples": [{}] * 4000})
    content = json.dumps(body, separators=(",", ":"))
    assert len(content) < SMALL_BODY_BYTES < weight(content.encode(), 2**30)
    assert problem_of(api.post("/extract", content=content, headers=JSON), 422).field is not None
