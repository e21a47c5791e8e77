"""Jobs are paused, put before others and deleted over HTTP."""

from pathlib import Path

import httpx2
import pytest
from sqlalchemy import Text, cast, update

from schemas.job import JobSummary
from service.settings import Settings
from service.store import Store, jobs, plans
from service.store.tables import JOB
from tests.support.api import JSON, complete, job_body, problem_of
from tests.support.store_cases import OWNER, TTL_S


def test_jobs_of_a_higher_priority_come_first(api: httpx2.Client, store: Store, job: JobSummary, model: Path):
    """1. The second job is submitted before the others, the third is put before it. 2. They are leased."""
    body = job_body(model)
    second = api.post("/extract?priority=5", json=body).json()
    third = api.post("/extract", json=body).json()
    changed = api.patch(f"/jobs/{third['id']}", json={"priority": 6}).json()
    assert (second["priority"], changed["priority"]) == (5, 6)
    leases = [plans.lease(store, OWNER, TTL_S) for _ in range(3)]
    assert [lease and lease.job_id for lease in leases] == [third["id"], second["id"], job.id]


def test_a_priority_that_a_job_has_is_no_event(api: httpx2.Client, store: Store, job: JobSummary):
    for _ in range(3):
        assert api.patch(f"/jobs/{job.id}", json={"priority": 6}).json()["priority"] == 6
    messages = [event.message for event in store.read(jobs.events, job.id)]
    assert messages.count("priority 6") == 1


@pytest.mark.parametrize("priority", [101, -101, "high", None])
def test_a_priority_out_of_bounds_is_refused(api: httpx2.Client, job: JobSummary, priority: object):
    problem = problem_of(api.patch(f"/jobs/{job.id}", json={"priority": priority}), 422)
    assert problem.field == "priority"


@pytest.mark.parametrize(
    ("sent", "field", "said"),
    [
        (b'{"priority": 1, "priority": 2}', "priority", "several"),
        (b'{"priority": 1', None, "is not JSON: "),
        (b"\xff", None, "is not JSON"),
        (b'{"\\ud800": 1, "\\ud800": 2}', None, "is not JSON"),
    ],
)
def test_a_body_that_is_no_json_or_gives_a_field_twice_is_refused_as_at_extract(
    api: httpx2.Client, job: JobSummary, sent: bytes, field: str | None, said: str
):
    for method, path in (
        ("PATCH", f"/jobs/{job.id}"),
        ("POST", "/extract"),
        ("POST", f"/jobs/{job.id}/pause"),
    ):
        problem = problem_of(api.request(method, path, content=sent, headers=JSON), 422)
        assert (problem.field, said in problem.detail) == (field, True)


def test_a_body_that_is_missing_no_object_or_of_another_type_says_what_to_send(
    api: httpx2.Client, job: JobSummary
):
    for method, path in (("PATCH", f"/jobs/{job.id}"), ("PUT", f"/jobs/{job.id}/consumers/a")):
        form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl says by itself
        for headers in (form, {}):
            refused = problem_of(api.request(method, path, content=b'{"priority": 5}', headers=headers), 415)
            assert "application/json" in str(refused.cure)
        assert problem_of(api.request(method, path), 422).field == "body"
        assert problem_of(api.request(method, path, json=[]), 422).cure == "send a JSON object"


def test_a_job_that_cannot_be_read_shows_its_request_and_is_cancelled_and_deleted(
    api: httpx2.Client, store: Store, job: JobSummary
):
    with store.writing() as tx:
        tx.connection.execute(update(JOB).where(JOB.c.id == job.id).values(identity=cast("{", Text)))
    refused = problem_of(api.get(f"/jobs/{job.id}"), 500)
    assert "cannot be read" in refused.detail and "cancelled and deleted" in str(refused.cure)
    assert api.get(f"/jobs/{job.id}/request").json()["model"] == job.model
    assert problem_of(api.delete(f"/jobs/{job.id}"), 409).cure
    cancelled = api.post(f"/jobs/{job.id}/cancel").json()
    assert cancelled["state"] == "cancelled" and cancelled["problem"]["detail"] == refused.detail
    assert api.delete(f"/jobs/{job.id}").status_code == 204
    problem_of(api.get(f"/jobs/{job.id}"), 404)


@pytest.mark.parametrize("choice", ["keep", "delete"])
def test_a_job_that_has_ended_is_deleted_with_or_without_its_dataset(
    api: httpx2.Client, store: Store, settings: Settings, job: JobSummary, choice: str
):
    """1. It is refused while the job is queued. 2. Nothing of the job is left but a dataset that is kept."""
    assert problem_of(api.delete(f"/jobs/{job.id}"), 409).cure
    complete(store, job.id, rejects=1)
    for folder in (settings.work_root / job.id, settings.dataset_dir(job.id)):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    assert api.delete(f"/jobs/{job.id}", params={"dataset": choice}).status_code == 204
    problem_of(api.get(f"/jobs/{job.id}"), 404)
    problem_of(api.delete(f"/jobs/{job.id}"), 404)
    assert job.id not in {one["id"] for one in api.get("/jobs").json()["jobs"]}
    assert not (settings.work_root / job.id).exists()
    left = [path.name for path in settings.dataset_dir(job.id).parent.iterdir() if job.id in path.name]
    assert left == ([job.id] if choice == "keep" else [])
    with store.reading() as tx:
        assert jobs.events(tx, job.id) == []
