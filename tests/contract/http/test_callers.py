"""A browser is made to call the service by a page of another site, or by another name: both are refused."""

from pathlib import Path

import httpx2
import pytest

from schemas.job import JobState, JobSummary
from service.settings import Settings
from service.store import Store, jobs
from tests.support.api import api_settings, problem_of, serving

FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_a_page_of_another_site_changes_and_makes_no_job(
    api: httpx2.Client, store: Store, job: JobSummary, headers: dict[str, str], verb: str
):
    problem = problem_of(api.post(f"/jobs/{job.id}/{verb}", headers=headers), 403)
    assert (problem.type, problem.field) == ("urn:quarry:caller-refused", "origin")
    assert problem.cure
    assert store.read(jobs.state, job.id) is JobState.QUEUED
    problem_of(api.post("/extract", json={}, headers=headers), 403)


@pytest.mark.parametrize(
    "headers", [{}, {"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"}], ids=str
)
def test_a_program_and_a_page_of_the_service_itself_change_a_job(
    api: httpx2.Client, job: JobSummary, headers: dict[str, str]
):
    own = {"Origin": str(api.base_url).rstrip("/")}
    assert api.post(f"/jobs/{job.id}/cancel", headers=headers or own).status_code == 200


def test_anybody_may_read_what_a_link_leads_to(api: httpx2.Client, job: JobSummary):
    """The page that holds the link does not see the answer: no header lets it."""
    answer = api.get(f"/jobs/{job.id}", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


HOSTS = {
    "localhost": 200,
    "LOCALHOST:8642": 200,
    "127.0.0.1:1": 200,
    "[::1]:8642": 200,
    "evil.example": 403,
    "evil.example:8642": 403,
    "localhost.evil.example": 403,
    "localhost:8642.evil.example": 403,
    "10.0.0.1": 403,
    "": 403,
}


@pytest.mark.parametrize(("host", "status"), HOSTS.items(), ids=repr)
def test_a_foreign_name_reaches_the_probes_alone(api: httpx2.Client, host: str, status: int):
    for path in ("/jobs", "/metrics", "/openapi.json", "/nothing"):
        answer = api.get(path, headers={"Host": host})
        if status == 403:
            problem = problem_of(answer, 403)
            assert problem.field == "host"
            assert "QUARRY_ALLOWED_HOSTS" in str(problem.cure)
        else:
            assert answer.status_code == (404 if path == "/nothing" else 200)
    for path in ("/healthz", "/readyz"):
        assert api.get(path, headers={"Host": host}).status_code == 200


def test_names_of_the_settings_and_the_bound_address_are_the_services_own(tmp_path: Path):
    settings: Settings = api_settings(tmp_path, host="Node5.example", allowed_hosts=["quarry"])
    with serving(settings, bind="127.0.0.2") as api:
        told = {
            host: api.get("/jobs", headers={"Host": host}).status_code
            for host in ("node5.example:80", "Quarry:8642", "127.0.0.2:8642", "127.0.0.3:8642")
        }
    # 401: under a name of its own the service asks for a key, since its host is no loopback one.
    assert told == {"node5.example:80": 401, "Quarry:8642": 401, "127.0.0.2:8642": 401, "127.0.0.3:8642": 403}
