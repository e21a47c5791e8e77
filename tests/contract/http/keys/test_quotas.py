"""What an owner's keys limit: jobs, bytes, priorities, schedules' jobs, requests a minute."""

from pathlib import Path

import httpx2
import pytest

from schemas.dataset.seal import make_folder
from schemas.names import posted_path
from schemas.schedule import RunOutcome
from service.plan import posted
from service.plan.posted import take
from service.settings import Settings
from service.store import Store, jobs, schedules
from tests.contract.http.keys.conftest import ADMIN, add, add_nightly, bearer, roots
from tests.support.api import complete, job_body, problem_of


def test_quotas_are_kept(api: httpx2.Client, store: Store, model: Path) -> None:
    _, headers = add(api, model_roots=[str(model.parent)], max_jobs=1)
    first = api.post("/extract", json=job_body(model), headers=headers | {"Idempotency-Key": "one"})
    assert first.status_code == 202
    refused = api.post("/extract", json=job_body(model), headers=headers)
    assert problem_of(refused, 429).type == "urn:quarry:quota-exceeded"
    again = api.post("/extract", json=job_body(model), headers=headers | {"Idempotency-Key": "one"})
    assert again.json()["id"] == first.json()["id"]
    complete(store, first.json()["id"])
    assert api.post("/extract", json=job_body(model), headers=headers).status_code == 202
    _, limited = add(api, model_roots=[str(model.parent)], max_bytes=1)
    refused = problem_of(api.post("/extract", json=job_body(model), headers=limited), 429)
    assert "max_jobs" in refused.detail, "the tightest of all of the owner's keys counts"
    api.post(f"/jobs/{api.get('/jobs', headers=limited).json()['jobs'][0]['id']}/cancel", headers=limited)
    assert "max_bytes" in problem_of(api.post("/extract", json=job_body(model), headers=limited), 429).detail
    problem_of(api.delete(f"/jobs/{first.json()['id']}", headers=limited), 403)
    for job in api.get("/jobs", headers=limited).json()["jobs"]:
        assert (
            "max_bytes" in problem_of(api.post("/extract", json=job_body(model), headers=limited), 429).detail
        )
        gone = api.delete(f"/jobs/{job['id']}", params={"dataset": "delete"}, headers=limited)
        assert gone.status_code == 204
    assert api.post("/extract", json=job_body(model), headers=limited).status_code == 202


def test_no_key_of_an_owner_with_a_limit_keeps_a_dataset_that_nobody_counts(
    api: httpx2.Client, store: Store, model: Path
) -> None:
    _, limited = add(api, model_roots=[str(model.parent)], max_bytes=10**9)
    _, unlimited = add(api)
    path = f"/jobs/{api.post('/extract', json=job_body(model), headers=limited).json()['id']}"
    complete(store, path.removeprefix("/jobs/"))
    for headers in (limited, unlimited):
        assert problem_of(api.delete(path, headers=headers), 403).field == "dataset"
    assert api.delete(path, headers=bearer(ADMIN)).status_code == 204


def test_posted_samples_and_requests_of_jobs_that_have_ended_count_as_bytes(
    api: httpx2.Client, store: Store, model: Path
) -> None:
    _, headers = add(api, **roots(model), max_bytes=1000)
    add_nightly(api, model, headers, posted=True)
    posts = [
        api.post(
            "/schedules/nightly/samples", json={"samples": [{"text": f"{n}" * 400}]}, headers=headers
        ).status_code
        for n in range(5)
    ]
    assert posts == [202, 202, 202, 429, 429], "each takes half of it"


@pytest.mark.parametrize("is_deleted", [False, True])
def test_posted_samples_that_a_stopped_job_took_still_count_as_bytes(
    api: httpx2.Client, store: Store, settings: Settings, model: Path, is_deleted: bool
) -> None:
    _, headers = add(api, **roots(model), max_bytes=2000)

    def post(text: str) -> int:
        body = {"samples": [{"text": text}]}
        return api.post("/schedules/nightly/samples", json=body, headers=headers).status_code

    add_nightly(api, model, headers, posted=True)
    assert post("a" * 2000) == 202
    job_id = api.post("/schedules/nightly/run", headers=headers).json()["job_id"]
    number, _ = store.read(schedules.numbered, "nightly")
    make_folder(settings.work_root / posted_path(job_id))
    take(settings, number, job_id, {}, lambda: None)
    store.write(jobs.cancel, job_id)
    if is_deleted:
        api.delete("/schedules/nightly", headers=headers).raise_for_status()
        add_nightly(api, model, headers, posted=True)
    assert post("b") == 429


def test_what_waits_is_not_counted_at_each_post_where_nothing_limits_it(
    api: httpx2.Client, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may post each sample as it comes: by 50,000 of them, a count takes a second."""
    counts: list[str] = []
    monkeypatch.setattr(posted, "bytes_of", lambda store, settings, owner: counts.append(owner) or 0)
    for name, limit in (("team-a", None), ("team-b", 1000)):
        _, headers = add(api, name, **roots(model), max_bytes=limit)
        add_nightly(api, model, headers, name, posted=True)
        body = {"samples": [{"text": "a row"}]}
        assert api.post(f"/schedules/{name}/samples", json=body, headers=headers).status_code == 202
    assert counts == ["team-b"]


def test_a_key_bounds_the_priority_of_its_jobs(api: httpx2.Client, model: Path) -> None:
    _, headers = add(api, model_roots=[str(model.parent)], max_priority=0)
    high = api.post("/extract", json=job_body(model), params={"priority": 1}, headers=headers)
    assert problem_of(high, 403).field == "priority"
    low = api.post("/extract", json=job_body(model), params={"priority": -5}, headers=headers)
    assert low.status_code == 202
    path = f"/jobs/{low.json()['id']}"
    assert problem_of(api.patch(path, json={"priority": 7}, headers=headers), 403).field == "priority"
    assert api.patch(path, json={"priority": 0}, headers=headers).status_code == 200
    assert api.patch(path, json={"priority": 7}, headers=bearer(ADMIN)).status_code == 200


def test_a_key_bounds_the_priority_of_what_its_schedules_make(api: httpx2.Client, model: Path) -> None:
    for most, priority in ((-5, -5), (7, 0)):
        _, headers = add(api, f"team{most}", **roots(model), max_priority=most)
        add_nightly(api, model, headers, f"nightly{most}")
        made = api.post(f"/schedules/nightly{most}/run", headers=headers).json()["job_id"]
        assert api.get(f"/jobs/{made}", headers=headers).json()["priority"] == priority


def test_a_preview_shows_the_schedule_as_its_owner_would_make_it(
    api: httpx2.Client, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, headers = add(api, **roots(model))
    source = {"kind": "file", "path": str(model.parent / "*.jsonl")}
    body = {"name": "nightly", "cron": "0 3 * * *", "request": job_body(model, source=source)}
    path = "/schedules?preview=true"
    assert api.post(path, json=body, headers=headers).json()["owner"] == "team-a"
    monkeypatch.setattr(schedules, "MAX_OF_OWNER", 0)
    problem_of(api.post(path, json=body, headers=headers), 429)


def test_a_slot_counts_as_a_job_of_its_owner(api: httpx2.Client, store: Store, model: Path) -> None:
    _, headers = add(api, **roots(model), max_jobs=1)
    add_nightly(api, model, headers)
    first = api.post("/schedules/nightly/run", headers=headers).json()
    assert store.read(jobs.job, first["job_id"]).owner == "team-a"
    store.write(jobs.cancel, first["job_id"])
    api.post("/extract", json=job_body(model), headers=headers)
    assert api.post("/schedules/nightly/run", headers=headers).json()["outcome"] == RunOutcome.REFUSED


def test_a_schedule_makes_no_job_once_no_key_of_its_owner_may(api: httpx2.Client, store: Store, model: Path):
    key_id, headers = add(api, **roots(model))
    add_nightly(api, model, headers)
    api.delete(f"/keys/{key_id}", headers=bearer(ADMIN)).raise_for_status()
    for _ in range(2):
        run = api.post("/schedules/nightly/run", headers=bearer(ADMIN)).json()
        assert (run["outcome"], run["job_id"]) == (RunOutcome.REFUSED, None)
        assert "every key of team-a is revoked" in run["detail"]
        add(api, **roots(model), scopes=["jobs:read", "metrics"])
    _, headers = add(api, **roots(model))
    assert api.post("/schedules/nightly/run", headers=headers).json()["outcome"] == RunOutcome.SUBMITTED


def test_requests_a_minute_are_counted(api: httpx2.Client) -> None:
    _, headers = add(api, requests_per_minute=2)
    answers = [api.get("/jobs", headers=headers) for _ in range(6)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) in (2, 4), "the minute may end between two of them"
    assert problem_of(refused[0], 429).field == "Authorization"
    assert int(refused[0].headers["retry-after"]) > 0
    assert api.get("/jobs", headers=add(api, "team-b")[1]).status_code == 200
