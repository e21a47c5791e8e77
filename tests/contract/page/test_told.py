"""What a page tells its reader to do, and where things are."""

import json
import re
import shlex
from html import unescape
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from service.cli.entry import app
from service.store import Store, jobs
from tests.contract.page.conftest import ADMIN, add_key, bearer, cancel_others, cookie, submit, text_of
from tests.support.api import complete, job_body


def test_the_commands_work_as_they_are_pasted(
    api: httpx2.Client, store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """At any address, with the key of the environment."""
    monkeypatch.setenv("QUARRY_KEY", ADMIN)
    job_id = submit(api, model)
    for verb, state in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
        text = text_of(api.get(f"/ui/jobs/{job_id}", headers=cookie(api)))
        commands = [shlex.split(unescape(one)) for one in re.findall(r"<code>(quarry [^<]*)</code>", text)]
        (command,) = [one for one in commands if one[2] == verb]
        assert CliRunner().invoke(app, command[1:]).exit_code == 0
        assert store.read(jobs.state, job_id) == state
    over_tls = cookie(api) | {"X-Forwarded-Proto": "https"}
    text = text_of(api.get(f"/ui/jobs/{job_id}", headers=over_tls))
    assert f"--server https://127.0.0.1:{api.base_url.port}<" in text


def test_what_an_empty_page_says_makes_the_first_job_and_schedule(
    api: httpx2.Client, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And the job of a schedule names it, to those who may see it; the schedule has the job's state."""
    roots = {"model_roots": [str(model.parent)], "source_roots": [str(model.parent)]}
    (_, key), (_, of_jobs) = add_key(api, "new", **roots), add_key(api, "new", scopes=["jobs:read"])
    monkeypatch.setenv("QUARRY_KEY", key)
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps(job_body(model)))
    rows = model.parent / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    request = job_body(model, source={"kind": "file", "path": str(rows)})
    Path("nightly.json").write_text(json.dumps({"name": "first", "cron": "0 3 * * *", "request": request}))
    for path in ("/", "/ui/schedules"):
        text = text_of(api.get(path, headers=cookie(api, key)))
        (command,) = re.findall(r"<code>(quarry [^<]*)</code>", text)
        ran = CliRunner().invoke(app, shlex.split(unescape(command))[1:])
        assert ran.exit_code == 0, ran.output
    job_id = api.post("/schedules/first/run", headers=bearer(key)).json()["job_id"]
    pages = [text_of(api.get(f"/ui/jobs/{job_id}", headers=cookie(api, who))) for who in (key, of_jobs)]
    assert ["schedule first," in page for page in pages] == [False, True]
    assert ['schedule <a href="/ui/schedules/first">first</a>' in page for page in pages] == [True, False]
    states = re.findall(r'data-state="(\w+)"', text_of(api.get("/ui/schedules", headers=cookie(api, key))))
    assert states == ["active", "submitted", "queued"]


def test_a_job_that_has_ended_says_where_its_dataset_is_and_awaits_nothing(
    api: httpx2.Client, store: Store, model: Path
):
    job_id, cancelled = submit(api, model, canary="skip"), submit(api, model)
    cancel_others(store, job_id)
    complete(store, job_id)
    text, none = (text_of(api.get(f"/ui/jobs/{one}", headers=cookie(api))) for one in (job_id, cancelled))
    assert f"The dataset is <code>jobs/{job_id}</code> in the service's data folder." in text
    assert "There are no files." in none and "No unit is committed." in none
    assert not any(re.search(r"\byet\b", page) for page in (text, none))
