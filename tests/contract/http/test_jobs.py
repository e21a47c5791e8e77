"""GET /jobs and the routes of one job: read, cancelled, resumed, and what it wrote."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from fastapi import Response
from sqlalchemy import text

from schemas.job import JobPage, JobSummary
from schemas.names import manifest_path
from service.api.routes import jobs as job_routes
from service.settings import Settings
from service.store import Store, commits
from tests.support.api import (
    JSON,
    UNKNOWN,
    Looks,
    api_settings,
    begin,
    complete,
    job_body,
    problem_of,
    serving,
    small_target,
)


def test_jobs_are_listed_newest_first_page_by_page_each_once(api: httpx2.Client, store: Store, model: Path):
    made = [api.post("/extract", json=job_body(model)).json()["id"] for _ in range(5)]
    listed: list[str] = []
    cursor: str | None = None
    while len(listed) < len(made):
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = api.get("/jobs", params=query).json()
        listed += [one["id"] for one in page["jobs"]]
        cursor = page["next_cursor"]
    assert listed[: len(made)] == made[::-1]
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("state=done", "state"),
        ("x=1", "x"),
        ("cursor=nonsense", "cursor"),
    ],
)
def test_a_listing_that_cannot_be_given_names_the_parameter(api: httpx2.Client, query: str, field: str):
    assert problem_of(api.get(f"/jobs?{query}"), 422).field == field


def test_a_listed_job_is_told_as_it_is_read(api: httpx2.Client, store: Store, job: JobSummary, model: Path):
    begin(store, job.id)
    read = api.get(f"/jobs/{job.id}").json()
    (listed,) = api.get("/jobs", params={"limit": 1}).json()["jobs"]
    assert listed == read
    assert (listed["model"], listed["source_kind"]) == (str(model), "inline")
    assert listed["identity_sha256"] is not None
    for state, ids in {"running": [job.id], "queued": []}.items():
        page = JobPage.model_validate(api.get("/jobs", params={"state": state}).json())
        assert [one.id for one in page.jobs] == ids


ROUTES_OF_A_JOB = [
    ("GET", ""),
    ("GET", "/request"),
    ("DELETE", ""),
    ("POST", "/cancel"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/events"),
    ("GET", "/units"),
    ("GET", "/manifest"),
    ("GET", "/rejects"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES_OF_A_JOB)
@pytest.mark.parametrize(
    "job_id", [UNKNOWN, "nonsense", "j-XYZ", "%00", "j-0000000000000000%0a", "..%2f..%2fetc"]
)
def test_a_job_that_does_not_exist_is_not_found(api: httpx2.Client, method: str, path: str, job_id: str):
    assert problem_of(api.request(method, f"/jobs/{job_id}{path}"), 404).type == "urn:quarry:not-found"


def test_what_can_be_no_job_id_is_refused_before_the_store_is_asked(api: httpx2.Client):
    assert problem_of(api.get("/jobs/nonsense"), 404).cure == "GET /jobs lists the jobs"
    assert problem_of(api.get(f"/jobs/{UNKNOWN}"), 404).cure != "GET /jobs lists the jobs"


@pytest.mark.parametrize(("method", "path"), ROUTES_OF_A_JOB)
def test_an_unknown_parameter_is_refused_by_name(api: httpx2.Client, job: JobSummary, method: str, path: str):
    assert problem_of(api.request(method, f"/jobs/{job.id}{path}?verbose=1"), 422).field == "verbose"


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
def test_a_verb_takes_no_body_but_an_empty_object(api: httpx2.Client, job: JobSummary, verb: str):
    assert problem_of(api.post(f"/jobs/{job.id}/{verb}", json={"force": True}), 422).field == "force"
    problem_of(api.post(f"/jobs/{job.id}/{verb}", content=b"{", headers=JSON), 422)
    problem_of(api.post(f"/jobs/{job.id}/{verb}", content=b"{}", headers={"Content-Type": "text/plain"}), 415)


def test_a_job_is_paused_cancelled_and_resumed_where_its_state_allows_it(
    api: httpx2.Client, store: Store, job: JobSummary
):
    assert api.post(f"/jobs/{job.id}/pause").json()["state"] == "paused"
    assert api.post(f"/jobs/{job.id}/resume").json()["state"] == "queued"
    assert api.post(f"/jobs/{job.id}/cancel").json()["state"] == "cancelled"
    assert api.post(f"/jobs/{job.id}/cancel").json()["state"] == "cancelled"
    assert api.post(f"/jobs/{job.id}/resume", json={}).json()["state"] == "queued"
    assert api.get(f"/jobs/{job.id}").json()["state"] == "queued"
    assert problem_of(api.post(f"/jobs/{job.id}/resume"), 409).type == "urn:quarry:illegal-move"
    complete(store, job.id)
    assert problem_of(api.post(f"/jobs/{job.id}/cancel"), 409).cure is not None
    problem_of(api.post(f"/jobs/{job.id}/resume"), 409)


def test_units_and_rejects_come_in_pages_without_gap_or_double(
    api: httpx2.Client, store: Store, job: JobSummary
):
    complete(store, job.id, num_units=5, rejects=5)
    for name, path_or_position in (("units", "unit"), ("rejects", "position")):
        found: list[int] = []
        after: int | None = -1
        while after is not None:
            page = api.get(f"/jobs/{job.id}/{name}", params={"after": after, "limit": 2}).json()
            found += [one[path_or_position] for one in page[name]]
            assert len(page[name]) <= 2
            after = page["next_after"] if page[name] else None
        assert found == sorted(set(found))
        assert len(found) == 5


def test_a_page_of_units_is_read_alone(api: httpx2.Client, settings: Settings, store: Store, job: JobSummary):
    """What other pages would show cannot be read; beyond the last unit, however far, a page is empty."""
    complete(store, job.id, num_units=3)
    database = Store(settings.database(), time.time)
    with database.writing() as tx:
        spoilt = text("UPDATE shard SET entry = 'unreadable' WHERE job_id = :job_id AND unit = 2")
        tx.connection.execute(spoilt, {"job_id": job.id})
    database.close()
    page = api.get(f"/jobs/{job.id}/units", params={"limit": 1}).json()
    assert [unit["unit"] for unit in page["units"]] == [0]
    for after in (2**40, 2**63 - 1):
        page = api.get(f"/jobs/{job.id}/units", params={"after": after}).json()
        assert (page["units"], page["next_after"]) == ([], after)


def test_a_unit_that_is_waited_for_comes_when_it_is_committed(
    api: httpx2.Client, store: Store, job: JobSummary
):
    """1. There is none yet. 2. One is asked for. 3. It is committed, and told with its receipts."""
    waited = {"wait": 60}
    assert api.get(f"/jobs/{job.id}/units", params={"wait": 0}).json()["units"] == []
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(api.get, f"/jobs/{job.id}/units", params=waited, timeout=60)
        complete(store, job.id, num_units=1)
        page = coming.result().json()
    assert (page["repository"], Path(page["folder"]).name) == (None, job.id)
    (unit,) = page["units"]
    assert (unit["unit"], unit["epoch"], unit["in_folder"], unit["in_repository"]) == (0, 1, True, False)
    (shard,) = unit["shards"]
    assert shard == {
        "path": f"data/{job.id}/train-00000.parquet",
        "sha256": f"{1:064x}",
        "xxh3": f"{1:032x}",
        "bytes": 1000,
        "rows": 1,
        "tokens": 5,
        "unit": 0,
        "epoch": 1,
        "layers": [{"layer_id": 4, "mean_rms": 1.0, "max_abs": 3.0}],
    }


def test_a_file_of_the_dataset_is_sent_whole_or_in_part_and_no_other(
    api: httpx2.Client, settings: Settings, job: JobSummary
):
    folder = settings.dataset_dir(job.id)
    shard = folder / "data" / job.id / "train-00000.parquet"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"PAR1 and more")
    secret = folder.parent / "secret"
    secret.write_text("of another")
    (folder / "link").symlink_to(secret)
    url = f"/jobs/{job.id}/files/data/{job.id}/train-00000.parquet"
    assert api.get(url).content == b"PAR1 and more"
    part = api.get(url, headers={"Range": "bytes=5-7"})
    assert (part.status_code, part.content) == (206, b"and")
    os.mkfifo(folder / "pipe")
    none = ["link", "%2e%2e/secret", "..%2fsecret", "%2fetc%2fpasswd", "data", "", "a%00b", "none", "pipe"]
    for path in (*none, "a" * 300, "a/" * 2500):
        assert problem_of(api.get(f"/jobs/{job.id}/files/{path}"), 404).detail
    for part in ("0-99", "12-", "-1", "-99"):
        assert api.get(url, headers={"Range": f"bytes={part}"}).status_code == 206
    for part in ("13-", "5-4", "-0"):
        refused = api.get(url, headers={"Range": f"bytes={part}"})
        assert problem_of(refused, 416).detail
        assert refused.headers["Content-Range"] == "bytes */13"
    for part in ("bytes=0-0,2-2", "bytes=" + "0-0," * 5000, "bytes=-", "bytes=--1", "lines=1-2", "nonsense"):
        assert problem_of(api.get(url, headers={"Range": part}), 422).field == "Range"


def test_a_file_that_is_removed_once_it_was_found_is_not_there(
    api: httpx2.Client, settings: Settings, store: Store, job: JobSummary, monkeypatch: pytest.MonkeyPatch
):
    """A follower that consumes shards and the deletion of a dataset remove files while others read."""
    complete(store, job.id)
    send = job_routes._sent

    def removed(file: Path, media_type: str, part: str | None) -> Response:
        file.unlink()
        return send(file, media_type, part)

    monkeypatch.setattr(job_routes, "_sent", removed)
    for name in ("shard", manifest_path(job.id)):
        path = settings.dataset_dir(job.id) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    assert problem_of(api.get(f"/jobs/{job.id}/files/shard"), 404).field == "path"
    assert problem_of(api.get(f"/jobs/{job.id}/manifest"), 404).field == "job_id"


def test_an_answer_ends_with_its_last_byte(api: httpx2.Client, settings: Settings, job: JobSummary):
    """A file is read in parts: one of whole parts ended later, and the next request came before that."""
    folder = settings.dataset_dir(job.id)
    folder.mkdir(parents=True)
    (folder / "shard").write_bytes(bytes(2**20))
    for _ in range(10):
        assert len(api.get(f"/jobs/{job.id}/files/shard").content) == 2**20
        assert api.get("/healthz").status_code == 200


def test_a_head_says_what_a_get_would_send(
    api: httpx2.Client, settings: Settings, store: Store, job: JobSummary
):
    """Of probes, lists, files and the manifest; of an event stream it would not end."""
    complete(store, job.id)
    folder = settings.dataset_dir(job.id)
    for name in ("shard", manifest_path(job.id)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(2**20))
    of_job = (f"/jobs/{job.id}/files/shard", f"/jobs/{job.id}/files/none", f"/jobs/{job.id}/manifest")
    others = ("/schedules", "/keys", "/workers", f"/jobs/{job.id}/consumers")
    for path in ("/healthz", "/readyz", f"/jobs/{job.id}", *others, *of_job):
        asked, headed = (api.request(method, path) for method in ("GET", "HEAD"))
        assert (headed.status_code, headed.content) == (asked.status_code, b""), path
        for name in ("content-length", "content-type"):
            assert headed.headers[name] == asked.headers[name], path
    part = api.head(of_job[0], headers={"Range": "bytes=5-7"})
    assert (part.status_code, part.headers["content-length"]) == (206, "3")
    assert api.head(f"/jobs/{job.id}/events").status_code == 405
    operations = api.get("/openapi.json").json()["paths"].values()
    assert not any("head" in methods for methods in operations)


def test_the_final_norm_is_sent_from_the_first_commit_on(api: httpx2.Client, store: Store, job: JobSummary):
    """The folder gets it with the publication; who follows the job needs it before."""
    url = f"/jobs/{job.id}/files/final_norm.safetensors"
    assert problem_of(api.get(url), 404).field == "path"
    complete(store, job.id)
    assert api.get(url).content == store.read(commits.final_norm, job.id)


def test_a_job_that_is_deleted_while_its_units_are_waited_for_is_not_there(
    api: httpx2.Client, job: JobSummary, store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(job_routes, "LISTING_S", 2.0)
    waiting = Looks(monkeypatch)
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(api.get, f"/jobs/{job.id}/units", params={"wait": 60}, timeout=60)
        assert waiting.begun.acquire(timeout=30)
        assert api.post(f"/jobs/{job.id}/cancel").status_code == 200
        assert api.delete(f"/jobs/{job.id}").status_code == 204
        assert problem_of(coming.result(), 404).field == "job_id"


def test_who_waits_for_units_of_a_silent_job_costs_the_store_nothing(
    api: httpx2.Client, job: JobSummary, monkeypatch: pytest.MonkeyPatch
):
    """Two looks: one at first, and one for the events that there were before."""
    monkeypatch.setattr(job_routes, "LISTING_S", 0.0)
    waiting = Looks(monkeypatch)
    page = api.get(f"/jobs/{job.id}/units", params={"wait": 1}, timeout=60).json()
    assert (page["units"], page["state"]) == ([], "queued")
    assert waiting.number <= 2


@pytest.mark.parametrize("name", ["units", "rejects"])
@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "after=-2", f"after={2**63}", "after=x"])
def test_a_page_out_of_bounds_is_refused(api: httpx2.Client, job: JobSummary, name: str, query: str):
    assert problem_of(api.get(f"/jobs/{job.id}/{name}?{query}"), 422).field == query.partition("=")[0]


def test_a_manifest_is_sent_as_it_stands_once_the_job_is_complete(
    api: httpx2.Client, store: Store, settings: Settings, job: JobSummary
):
    """1. Queued: a conflict. 2. Complete, but deleted here: not found. 3. Complete: the file's own bytes."""
    assert problem_of(api.get(f"/jobs/{job.id}/manifest"), 409).type == "urn:quarry:illegal-move"
    complete(store, job.id)
    assert "no new samples" in str(problem_of(api.get(f"/jobs/{job.id}/manifest"), 404).cure)
    path = settings.dataset_dir(job.id) / manifest_path(job.id)
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"complete": true}')
    response = api.get(f"/jobs/{job.id}/manifest")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.content == b'{"complete": true}'
    for part, status in (("bytes=0-0", 206), ("bytes=18-", 416), ("bytes=0-0,2-2", 422), ("lines=1", 422)):
        answer = api.get(f"/jobs/{job.id}/manifest", headers={"Range": part})
        assert answer.status_code == status
        assert status == 206 or problem_of(answer, status).detail


def test_the_folder_of_units_is_whole_where_the_data_folder_is_named_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with serving(api_settings(tmp_path, data_dir=Path("data"))) as api:
        job = api.post("/extract", json=job_body(small_target(tmp_path / "model"))).json()["id"]
        assert api.get(f"/jobs/{job}/units").json()["folder"] == str(tmp_path / "data" / "jobs" / job)
