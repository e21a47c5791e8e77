"""The routes of schedules; tests/unit/cli has their commands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import Text, cast, update

from service.cli import schedules as commands
from service.client import ProblemReceived, Quarry
from service.settings import Settings
from service.store import Store, jobs, schedules
from service.store.schedule_tables import SCHEDULE
from tests.support.api import JSON, problem_of


@pytest.fixture
def rows(settings: Settings) -> Path:
    folder = settings.source_roots[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text('{"text": "a row"}\n')
    return path


@pytest.fixture
def body(model: Path, rows: Path) -> dict[str, Any]:
    request = {"model": str(model), "source": {"kind": "file", "path": rows.name}, "layers": [2]}
    return {"name": "nightly", "cron": "0 3 * * *", "time_zone": "Europe/Berlin", "request": request}


@pytest.fixture
def nightly(api: httpx2.Client, body: dict[str, Any]) -> Iterator[str]:
    """A schedule of this test alone: tests of one server run in any order, and `check` reads them all."""
    assert api.post("/schedules", json=body).status_code == 201
    yield "/schedules/nightly"
    api.delete("/schedules/nightly")


def test_a_schedule_is_made_read_changed_run_and_deleted(
    api: httpx2.Client, store: Store, nightly: str, body: dict[str, Any]
) -> None:
    made = api.get(nightly).json()
    assert (made["state"], len(made["next_slots"]), made["last_run"]) == ("active", 5, None)
    assert api.get("/schedules").json()["schedules"] == [made]
    assert api.get(f"{nightly}/request").json()["model"] == body["request"]["model"]

    paused = api.patch(nightly, json={"paused": True}).json()
    assert (paused["state"], paused["next_slots"]) == ("paused", [])
    changed = api.patch(nightly, json={"cron": "30 4 * * *", "overlap": "skip", "paused": False}).json()
    assert (changed["cron"], changed["overlap"], changed["state"]) == ("30 4 * * *", "skip", "active")
    assert changed["time_zone"] == "Europe/Berlin"

    assert problem_of(api.post(f"{nightly}/run", json={"samples": "all"}), 422).field == "samples"
    run = api.post(f"{nightly}/run")
    assert run.status_code == 202
    job = store.read(jobs.job, run.json()["job_id"])
    assert job.model == body["request"]["model"]
    assert problem_of(api.post(f"{nightly}/run"), 409).field == "name"
    assert [one["job_id"] for one in api.get(f"{nightly}/runs").json()["runs"]] == [job.id]

    store.write(jobs.cancel, job.id)
    metrics = api.get("/metrics").text
    assert 'quarry_schedule_failing{schedule="nightly"} 1.0' in metrics
    assert 'quarry_schedule_last_good_timestamp_seconds{schedule="nightly"}' in metrics

    assert api.delete(nightly).status_code == 204
    assert problem_of(api.get(nightly), 404).field == "name"
    assert store.read(jobs.job, job.id).id == job.id


def test_a_preview_keeps_nothing(api: httpx2.Client, body: dict[str, Any]) -> None:
    seen = api.post("/schedules?preview=true", json=body | {"name": "seen"})
    assert seen.status_code == 200 and len(seen.json()["next_slots"]) == 5
    assert problem_of(api.get("/schedules/seen"), 404).field == "name"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cron": "61 * * * *"}, "cron"),
        ({"time_zone": "Mars/Olympus"}, "time_zone"),
        ({"ends_at": "tomorrow"}, "ends_at"),
        ({"missed": "never"}, "missed"),
        ({"overlap": "wait"}, "overlap"),
        ({"name": "Nightly run"}, "name"),
        ({"evry": 5}, "evry"),
        (
            {"request": {"model": "org/model", "source": {"kind": "inline", "samples": [{"text": "a"}]}}},
            "request",
        ),
    ],
)
def test_a_bad_value_is_named(
    api: httpx2.Client, body: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    assert problem_of(api.post("/schedules", json=body | change), 422).field == field


def test_slots_before_a_time_that_utc_does_not_have_are_refused(api: httpx2.Client, nightly: str) -> None:
    runs = api.get(f"{nightly}/runs", params={"before": "0001-01-01T00:00:00+14:00"})
    assert problem_of(runs, 422).field == "before"


def test_a_request_that_cannot_be_carried_out_is_refused_when_it_is_given(
    api: httpx2.Client, body: dict[str, Any]
) -> None:
    wrong = body["request"] | {"layers": [99]}
    assert problem_of(api.post("/schedules", json=body | {"request": wrong}), 422).field == "layers"


@pytest.mark.parametrize(
    ("change", "field"), [({"cron": "x"}, "cron"), ({"paused": "maybe"}, "paused"), ({"name": "b"}, "name")]
)
def test_a_bad_change_is_named_and_changes_nothing(
    api: httpx2.Client, nightly: str, change: dict[str, Any], field: str
) -> None:
    before = api.get(nightly).json()
    assert problem_of(api.patch(nightly, json=change), 422).field == field
    assert api.get(nightly).json() == before


def test_its_request_is_changed_and_checked_as_when_it_is_made(
    api: httpx2.Client, store: Store, nightly: str, body: dict[str, Any]
) -> None:
    """1. Another request, with another rule. 2. One that cannot be carried out changes nothing of both."""
    request = body["request"]
    changed = api.patch(nightly, json={"request": request | {"layers": [1]}, "overlap": "skip"})
    assert (changed.status_code, changed.json()["overlap"]) == (200, "skip")
    stored = api.get(f"{nightly}/request").json()
    assert stored["layers"] == [1]
    inline = {"kind": "inline", "samples": [{"text": "a"}]}
    for wrong, field in (
        ({"layers": [99]}, "layers"),
        ({"source": inline}, "request"),
        ({"part": {"index": 1, "of": 2}}, "request"),
        ({"max_tokens": "many"}, "request.max_tokens"),
    ):
        refused = api.patch(nightly, json={"request": request | wrong, "overlap": "queue"})
        assert problem_of(refused, 422).field == field
    refused = api.patch(nightly, json={"request": request, "cron": "x"})
    assert problem_of(refused, 422).field == "cron"
    refused = api.patch(
        nightly, json={"request": request | {"source": {"kind": "posted"}}, "overlap": "queue"}
    )
    assert problem_of(refused, 409).field == "request.source.kind"
    problem_of(api.patch(nightly, content="{}", headers={"Content-Type": "text/plain"}), 415)
    problem_of(api.patch(nightly, json={"request": request | {"template": "x" * 2**21}}), 413)
    assert api.get(f"{nightly}/request").json() == stored
    assert api.get(nightly).json()["overlap"] == "skip"
    run = api.post(f"{nightly}/run").json()
    assert store.read(jobs.request, run["job_id"]).layers == (1,)


def test_its_request_names_only_what_its_owner_may_use_whoever_changes_it(
    api: httpx2.Client, store: Store, nightly: str, body: dict[str, Any]
) -> None:
    assert api.patch(nightly, json={"request": body["request"]}).status_code == 200
    with store.writing() as tx:
        named = update(SCHEDULE).where(SCHEDULE.c.name == "nightly")
        tx.connection.execute(named.values(owner="somebody-without-a-key"))
    refused = api.patch(nightly, json={"request": body["request"]})
    assert problem_of(refused, 422).field == "model"


def test_posted_samples_lie_in_the_spool_until_the_schedule_is_deleted(
    api: httpx2.Client, store: Store, settings: Settings, body: dict[str, Any]
) -> None:
    request = body["request"] | {"source": {"kind": "posted"}}
    assert api.post("/schedules", json=body | {"name": "posted", "request": request}).status_code == 201
    assert api.get("/schedules/posted/request").json()["source"] == {"kind": "posted"}
    route, sample = "/schedules/posted/samples", {"id": "a", "text": "a row"}
    for _ in range(2):
        answer = api.post(route, json={"samples": [sample]})
        assert (answer.status_code, answer.json()) == (202, {"samples": 1})
    spool = settings.spool(store.read(schedules.numbered, "posted")[0])
    (file,) = spool.iterdir()
    assert json.loads(file.read_text()) == sample
    assert problem_of(api.post(route, json={"samples": []}), 422).field == "samples"
    wrong = {"samples": [sample, {"text": "x", "token_ids": [1]}]}
    assert str(problem_of(api.post(route, json=wrong), 422).field).startswith("samples.1")
    assert api.delete("/schedules/posted").status_code == 204
    assert not spool.exists()


@pytest.mark.parametrize("sent", ["{", "[]", '"nightly"'])
def test_a_body_that_is_no_schedule_is_refused(api: httpx2.Client, sent: str) -> None:
    problem_of(api.post("/schedules", content=sent, headers=JSON), 422)


def test_one_whose_rules_cannot_be_read_is_named_beside_the_others(
    api: httpx2.Client, store: Store, nightly: str, body: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the list, on the page, by the client and the command line, and where it is asked for itself."""
    assert api.post("/schedules", json=body | {"name": "a-damaged"}).status_code == 201
    with store.writing() as tx:
        of_it = update(SCHEDULE).where(SCHEDULE.c.name == "a-damaged")
        tx.connection.execute(of_it.values(rules=cast('{"cron": 7}', Text)))
    answer = api.get("/schedules").json()
    assert [one["name"] for one in answer["schedules"]] == ["nightly"]
    [damaged] = answer["unreadable"]
    problem = damaged["problem"]
    assert damaged["name"] == "a-damaged" and "cron: Input should be a valid string" in problem["detail"]
    assert "/schedules/a-damaged/request" in problem["cure"]

    shown = api.get("/ui/schedules").text
    assert "/ui/schedules/nightly" in shown and "cron: Input should be a valid string" in shown
    with Quarry(str(api.base_url)) as quarry:
        for command in (commands.list_schedules, commands.check):
            with pytest.raises(ProblemReceived, match="a-damaged"):
                command(quarry)
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == ["nightly"]

    for asked in (api.get, api.patch, api.post):
        path = "/schedules/a-damaged" + ("/run" if asked == api.post else "")
        sent = {"json": {"paused": True}} if asked == api.patch else {}
        assert "a-damaged" in problem_of(asked(path, **sent), 500).detail
    assert api.get("/schedules/a-damaged/request").status_code == 200
    assert api.delete("/schedules/a-damaged").status_code == 204
    assert api.get("/schedules").json()["unreadable"] == []
