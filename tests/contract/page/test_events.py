"""The event stream of the pages."""

from pathlib import Path
from typing import ClassVar, cast

import pytest
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse

from service.api.app import create_app
from service.api.auth import LASTING
from service.control.budget import Taken
from service.page import events
from service.store import Store, jobs
from tests.support.api import api_settings, job_body, serving, small_target, stored

ADMIN = "a" * 40


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(events, "EVERY_S", 0.05)
    monkeypatch.setattr(events, "SHARED_S", 0.0)


def test_it_says_that_a_job_has_changed_and_ends_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text(ADMIN)
    settings = api_settings(tmp_path, admin_key_file=tmp_path / "admin")
    admin = {"Authorization": f"Bearer {ADMIN}"}
    with serving(settings) as api, stored(settings) as store:
        new = {"name": "ada", "scopes": ["jobs:read", "jobs:write"], "model_roots": [str(tmp_path)]}
        made = api.post("/keys", json=new, headers=admin).json()
        assert api.post("/ui/sign-in", data={"key": made["key"]}).status_code == 303
        with api.stream("GET", "/ui/events") as stream:
            told = (line for line in stream.iter_lines() if line.startswith("data: "))
            assert next(told) == "data: changed"
            body = job_body(small_target(tmp_path / "model"))
            mine = api.post("/extract", json=body, headers={"Authorization": f"Bearer {made['key']}"})
            assert next(told) == "data: changed"
            store.write(jobs.pause, mine.json()["id"])
            assert next(told) == "data: changed"
            api.delete(f"/keys/{made['id']}", headers=admin).raise_for_status()
            assert list(told) == [], "it has ended"
        assert api.get("/ui/events").status_code == 303


def test_what_streams_is_bounded_as_streams_are(tmp_path: Path) -> None:
    """Else the pages that people leave open would be all of the requests that the service has in work."""
    routes = [route for route in create_app(api_settings(tmp_path)).routes if isinstance(route, APIRoute)]
    streams = [route.path for route in routes if route.response_class is EventSourceResponse]
    assert len(streams) == 2
    assert {LASTING.get(path) for path in streams} == {Taken.STREAMS}
    assert [route.methods for route in routes if route.path == "/ui/events"] == [{"GET"}]


def test_anothers_jobs_are_not_told_of(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text(ADMIN)
    settings = api_settings(tmp_path, admin_key_file=tmp_path / "admin")
    admin = {"Authorization": f"Bearer {ADMIN}"}
    with serving(settings) as api:
        made = api.post("/keys", json={"name": "ada", "scopes": ["jobs:read"]}, headers=admin).json()
        assert api.post("/ui/sign-in", data={"key": made["key"]}).status_code == 303
        with api.stream("GET", "/ui/events") as stream:
            told = (line for line in stream.iter_lines() if line.startswith("data: "))
            assert next(told) == "data: changed"
            body = job_body(small_target(tmp_path / "model"))
            api.post("/extract", json=body, headers=admin).raise_for_status()
            api.delete(f"/keys/{made['id']}", headers=admin).raise_for_status()
            assert list(told) == []


def test_the_pages_of_one_owner_share_a_look_at_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "SHARED_S", 60.0)

    class Counting:
        asked: ClassVar[list[str | None]] = []

        def read(self, verb: object, owner: str | None) -> tuple[int, int]:
            self.asked.append(owner)
            return len(self.asked), 0

    looks: events.Looks = {}
    owners = (None, None, "ada", None, "ada")
    seen = [events._newest(looks, cast(Store, Counting()), owner) for owner in owners]
    assert (seen, Counting.asked) == ([(1, 0), (1, 0), (2, 0), (1, 0), (2, 0)], [None, "ada"])
    monkeypatch.setattr(events, "SHARED_S", 0.0)
    assert events._newest(looks, cast(Store, Counting()), None) == (3, 0)
