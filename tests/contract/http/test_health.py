"""Health, readiness, metrics, and the form of every error that no route makes."""

import socket
import sqlite3
from pathlib import Path

import httpx2

from schemas.job import JobState, JobSummary
from service.errors import EngineDied, EngineRefused
from service.store import Store, hosts, jobs, totals, units, workers
from tests.support.api import UNKNOWN, api_settings, complete, problem_of, serving
from tests.support.store_cases import IDENTITY, OWNER, TTL_S, job_id, lease_unit, start_units


def test_a_data_folder_that_is_gone_is_not_ready(tmp_path: Path):
    settings = api_settings(tmp_path, database_url=f"sqlite:///{tmp_path / 'elsewhere.db'}")
    with serving(settings) as api:
        api.get("/readyz").raise_for_status()
        settings.data_dir.rmdir()
        assert problem_of(api.get("/readyz"), 503).type == "urn:quarry:store-unavailable"
        api.get("/healthz").raise_for_status()
        body = {"model": "org/model", "source": {"kind": "inline", "samples": [{"token_ids": [1, 2]}]}}
        problem = problem_of(api.post("/extract", json=body), 503)
        assert problem.type == "urn:quarry:store-unavailable" and "cannot be looked at" in problem.detail
        assert "cannot be looked at" in api.get("/ui/workers").raise_for_status().text


def test_a_database_of_another_version_is_not_ready(tmp_path: Path):
    settings = api_settings(tmp_path)
    with serving(settings) as api:
        with sqlite3.connect(settings.data_dir / "quarry.db") as database:
            database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.close()
        problem = problem_of(api.get("/readyz"), 503)
        assert problem.type == "urn:quarry:version-refused"
        assert "9999" in problem.detail


def test_metrics_count_requests_jobs_and_what_was_written(api: httpx2.Client, store: Store, job: JobSummary):
    complete(store, job.id, num_units=3, rejects=1)
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    counts, counted = store.read(jobs.counts), store.read(totals.totals)
    for state in JobState:
        assert float(values[f'quarry_jobs{{state="{state}"}}']) == counts[state]
    assert float(values["quarry_committed_samples_total"]) == counted.samples_written > 0
    assert float(values["quarry_rejected_samples_total"]) == counted.samples_rejected > 0
    assert float(values["quarry_committed_tokens_total"]) == counted.tokens_written > 0
    assert float(values["quarry_committed_bytes_total"]) == counted.bytes_written > 0
    assert float(values['http_requests_total{handler="/extract",method="POST",status="202"}']) > 0


def test_metrics_and_a_job_say_what_a_workers_engine_dies_over(api: httpx2.Client, store: Store):
    """1. A worker rests from the job's model, and another one does not. 2. The first one ends.

    Workers of two hosts with one name and one process id have series of their own, as two containers have;
    two checkpoints with one name have one.
    """
    start_units(store)
    store.write(hosts.register, "0" * 32, socket.gethostname(), is_home=True)
    scratch = store.write(hosts.register, "1" * 32, socket.gethostname(), is_home=False)
    store.write(workers.beat, "another", TTL_S, host=scratch)
    store.write(workers.beat, "a third", TTL_S)
    for _ in range(3):
        died = EngineDied("the device is gone")
        store.write(workers.engine_died, lease_unit(store), died, 1e-6, alone=False, sound=False)
        store.write(workers.try_again, job_id(1))
    start_units(store, number=2, repo_id="org/data")
    other = IDENTITY.model_copy(update={"revision": "beef"})
    start_units(store, number=3, repo_id="org/data", identity=other)
    for number in (2, 2, 3):
        lease = units.lease(store, "another", TTL_S, prefer_job=job_id(number), host=scratch)
        assert lease is not None and lease.job_id == job_id(number)
        store.write(workers.engine_died, lease, died, 1e-6, alone=False, sound=False)
        store.write(workers.try_again, job_id(number))
    store.write(workers.engine_died, lease_unit(store), died, 600.0, alone=False, sound=False)
    store.write(workers.pass_on, lease_unit(store, "a third", job_id(3)), EngineRefused("too small"), 600.0)
    assert "too small" in api.get("/ui/workers").text
    assert len(store.read(workers.sick)) == 4
    series = [line.rsplit(" ", 1) for line in api.get("/metrics").text.splitlines() if line[0] != "#"]
    values = dict(series)
    assert len(values) == len(series)
    assert float(values["quarry_workers"]) == 3
    for host_id, worker, number in (("0", OWNER, 4), ("1", "another", 2), ("0", "a third", 0)):
        labels = f'host="{socket.gethostname()}",host_id="{host_id * 32}",model="org/model",worker="{worker}"'
        assert float(values[f"quarry_worker_engine_deaths{{{labels}}}"]) == number
    waits = f"worker {socket.gethostname()}'s engine dies: the device is gone"
    assert api.get(f"/jobs/{job_id(1)}").json()["waits"] == waits
    assert waits in {one["waits"] for one in api.get("/jobs").json()["jobs"]}
    assert store.write(workers.leave, OWNER)
    assert api.get(f"/jobs/{job_id(1)}").json()["waits"] is None


def test_what_is_nowhere_and_what_is_done_wrongly_are_problems_too(api: httpx2.Client):
    assert problem_of(api.get("/nowhere"), 404).type == "urn:quarry:not-found"
    wrong = api.delete("/jobs")
    assert problem_of(wrong, 405).type == "urn:quarry:method-not-allowed"
    assert wrong.headers["allow"] == "GET, HEAD"
    for path, allowed in (
        (f"/jobs/{UNKNOWN}", "DELETE, GET, HEAD, PATCH"),
        ("/schedules", "GET, HEAD, POST"),
        (f"/jobs/{UNKNOWN}/consumers/a", "DELETE, PUT"),
    ):
        assert api.options(path).headers["allow"] == allowed
    for path in ("/docs", "/redoc", "/jobs/"):  # a redirect to /jobs would name the scheme that came here
        problem_of(api.get(path), 404)
