"""One server a test module, with its store opened from beside it."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from schemas.job import JobState, JobSummary
from service.settings import Settings
from service.store import Store, jobs
from tests.support.api import api_settings, job_body, serving, small_target, stored


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return api_settings(tmp_path_factory.mktemp("http"), max_body_bytes=100_000)


@pytest.fixture(scope="module")
def model(settings: Settings) -> Path:
    return small_target(settings.model_roots[0] / "model")


@pytest.fixture(scope="module")
def api(settings: Settings) -> Iterator[httpx2.Client]:
    with serving(settings) as client:
        yield client


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """The store behind the server. Jobs of earlier tests are ended: a lease is of this test's job."""
    with stored(settings) as store:
        for row in store.read(jobs.page, limit=200)[0]:
            if row.state in {JobState.QUEUED, JobState.RUNNING, JobState.PUBLISHING}:
                store.write(jobs.cancel, row.id)
        yield store


@pytest.fixture
def job(api: httpx2.Client, store: Store, model: Path) -> JobSummary:
    """A job that is queued."""
    return JobSummary.model_validate(api.post("/extract", json=job_body(model)).json())
