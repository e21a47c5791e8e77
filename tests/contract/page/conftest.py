"""A service for the tests of its page, and who signs in to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from schemas.job import JobState
from service.settings import Settings
from service.store import Store, jobs
from tests.support.api import api_settings, job_body, serving, small_target, stored

ADMIN = "a" * 40
EVERY = ["jobs:read", "jobs:write", "schedules", "metrics"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("page")
    (folder / "admin").write_text(ADMIN)
    return api_settings(folder, admin_key_file=folder / "admin")


@pytest.fixture(scope="module")
def api(settings: Settings) -> Iterator[httpx2.Client]:
    with serving(settings) as client:
        yield client


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    with stored(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(settings: Settings) -> Path:
    return small_target(settings.model_roots[0] / "model")


def bearer(key: str = ADMIN) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def add_key(api: httpx2.Client, name: str = "team-a", **grants: Any) -> tuple[str, str]:
    """Make a key; return its id and itself."""
    answer = api.post("/keys", json={"name": name, "scopes": EVERY} | grants, headers=bearer())
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], answer.json()["key"]


def cookie_name(api: httpx2.Client) -> str:
    return f"quarry_session_127_0_0_1_{api.base_url.port}"


def sign_in(api: httpx2.Client, key: str = ADMIN, to: str = "/ui/workers", **headers: str) -> httpx2.Response:
    answer = api.post("/ui/sign-in", data={"key": key, "to": to}, headers=headers)
    api.cookies.clear()  # each request says itself whose it is
    return answer


def cookie(api: httpx2.Client, key: str = ADMIN) -> dict[str, str]:
    """Return the header of somebody who is signed in."""
    answer = sign_in(api, key)
    assert answer.status_code == 303, answer.text
    return {"Cookie": answer.headers["set-cookie"].partition(";")[0]}


def submit(api: httpx2.Client, model: Path, key: str = ADMIN, **changes: Any) -> str:
    answer = api.post("/extract", json=job_body(model, **changes), headers=bearer(key))
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def cancel_others(store: Store, job_id: str) -> None:
    """Leave one job alone in the queue: the next one to be planned."""
    for row in store.read(jobs.page, limit=200)[0]:
        if row.id != job_id and row.state is JobState.QUEUED:
            store.write(jobs.cancel, row.id)


def of_job(job_id: str) -> list[str]:
    return [f"/ui/jobs/{job_id}{rest}" for rest in ("", "/files", "/rejects", "/samples/0/0")]


def text_of(answer: httpx2.Response, status: int = 200) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.text
