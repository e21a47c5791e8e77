"""GET /jobs says enough of each job to choose by, and never sends a request's samples."""

from pathlib import Path

import httpx2

from schemas.job import JobPage, JobView
from service.store import Store
from tests.support.api import begin, complete, job_body

LARGE = 80_000


def test_a_page_of_large_jobs_is_small(api: httpx2.Client, store: Store, model: Path):
    """Ten bodies of 80 kB each are listed in less than one of them."""
    body = job_body(model) | {"source": {"kind": "inline", "samples": [{"text": "x" * LARGE}]}}
    made = [api.post("/extract", json=body).json()["id"] for _ in range(10)]
    response = api.get("/jobs", params={"limit": 10})
    assert [one["id"] for one in response.json()["jobs"]] == made[::-1]
    assert len(response.content) < LARGE


def test_a_listed_job_is_told_as_it_is_read_but_for_its_request(
    api: httpx2.Client, store: Store, job: JobView, model: Path
):
    begin(store, job.id)
    read = api.get(f"/jobs/{job.id}").json()
    (listed,) = api.get("/jobs", params={"limit": 1}).json()["jobs"]
    assert listed == {name: value for name, value in read.items() if name != "request"}
    assert (listed["model"], listed["source_kind"]) == (str(model), "inline")
    assert listed["identity_sha256"] is not None


def test_a_page_is_of_the_form_that_the_command_line_reads(api: httpx2.Client, store: Store, job: JobView):
    complete(store, job.id)
    (listed,) = JobPage.model_validate(api.get("/jobs", params={"limit": 1}).json()).jobs
    assert (listed.id, listed.state, listed.progress.units_done) == (job.id, "completed", 2)
