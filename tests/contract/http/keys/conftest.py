"""A service with an admin's key for each test, since keys that one test makes would count in the next."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from service.settings import Settings
from tests.support.api import api_settings, job_body, serving, small_target

ADMIN = "a" * 40
EVERY = ["jobs:read", "jobs:write", "schedules", "metrics"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    return api_settings(tmp_path, admin_key_file=tmp_path / "admin")


@pytest.fixture
def api(settings: Settings) -> Iterator[httpx2.Client]:
    with serving(settings) as client:
        yield client


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return small_target(tmp_path / "models" / "small")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def add(api: httpx2.Client, name: str = "team-a", **grants: Any) -> tuple[str, dict[str, str]]:
    """Make a key; return its id and the headers that send it."""
    document = {"name": name, "scopes": EVERY} | grants
    answer = api.post("/keys", json=document, headers=bearer(ADMIN))
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], bearer(answer.json()["key"])


def roots(model: Path) -> dict[str, list[str]]:
    """Return the grants of a key that may use a model, and files beside it."""
    return {"model_roots": [str(model.parent)], "source_roots": [str(model.parent)]}


def add_nightly(
    api: httpx2.Client, model: Path, headers: dict[str, str], name: str = "nightly", *, posted: bool = False
) -> None:
    """Make a schedule, of files beside the model or of what is posted."""
    source = {"kind": "posted"} if posted else {"kind": "file", "path": str(model.parent / "*.jsonl")}
    body = {"name": name, "cron": "0 3 * * *", "request": job_body(model, source=source)}
    answer = api.post("/schedules", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
