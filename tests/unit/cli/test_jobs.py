"""`quarry jobs` and `quarry schedules` against a running service."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from secrets import token_hex
from threading import Thread
from typing import Any

import pytest

from schemas.job import JobState
from schemas.names import job_id_from_content
from schemas.request import ExtractRequest
from schemas.worker import WorkerStatus
from service.client import ProblemReceived, Quarry, clients
from service.store import NewJob, Store, hosts, jobs, plans, workers
from tests.support.api import (
    UNKNOWN,
    answering,
    api_settings,
    begin,
    complete,
    job_body,
    job_summary,
    reject,
    serving,
    small_target,
    stored,
)
from tests.unit.cli.conftest import HOSTILE, Run, assert_shown


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Store, dict[str, Any]]]:
    """A server's address, its store, and a body that it takes."""
    folder = tmp_path_factory.mktemp("service")
    settings = api_settings(folder)
    with serving(settings) as api, stored(settings) as store:
        yield str(api.base_url), store, job_body(small_target(folder / "model"))


@pytest.fixture
def jobs_verb(run: Run, service: tuple[str, Store, dict[str, Any]]) -> Run:
    """Run a verb of `quarry jobs` against the server."""
    server, _, _ = service
    return lambda verb, *arguments: run("jobs", verb, *arguments, "--server", server)


@pytest.fixture
def job(service: tuple[str, Store, dict[str, Any]]) -> Iterator[str]:
    """The id of a queued job, the only one that can run."""
    _, store, body = service
    for row in store.read(jobs.page)[0]:
        if row.state is JobState.QUEUED:
            store.write(jobs.cancel, row.id)
    key = token_hex()
    job_id = job_id_from_content(key)
    store.write(jobs.submit, NewJob.of(job_id, key, ExtractRequest.model_validate(body)))
    return job_id


def test_jobs_are_listed_shown_cancelled_and_resumed(jobs_verb: Run, job: str):
    assert job in jobs_verb("list").out
    assert json.loads(jobs_verb("list", "--json").out.splitlines()[0])["id"] == job
    assert json.loads(jobs_verb("show", job, "--json").out)["state"] == "queued"
    assert f"id        {job}\nstate     queued\n" in jobs_verb("show", job).out
    assert json.loads(jobs_verb("show", job, "--request").out)["layers"] == [1, 2]
    assert "cancelled" in jobs_verb("cancel", job).out
    assert job in jobs_verb("list", "--state", "cancelled").out
    assert "queued" in jobs_verb("resume", job).out


def test_every_reject_is_printed(jobs_verb: Run, job: str, service: tuple[str, Store, dict[str, Any]]):
    complete(service[1], job, num_units=1, rejects=1500)
    lines = jobs_verb("rejects", job).out.splitlines()
    assert len(lines) == 1500
    assert lines[0].split("\t") == ["1", "row 1", "empty", "no tokens"]
    assert json.loads(jobs_verb("rejects", job, "--json").out.splitlines()[-1])["position"] == 1500


def test_names_in_jobs_and_rejects_are_shown(
    jobs_verb: Run, job: str, service: tuple[str, Store, dict[str, Any]]
):
    _, store, body = service
    plan = begin(store, job)
    store.write(plans.finish, plan, [reject(0).model_copy(update={"source_id": HOSTILE, "detail": HOSTILE})])
    assert_shown(jobs_verb("rejects", job).out)
    assert jobs_verb("rejects", job, "--json").out.isascii()
    key = token_hex()
    named = ExtractRequest.model_validate(body | {"model": f"/{HOSTILE}"})
    store.write(jobs.submit, NewJob.of(job_id_from_content(key), key, named))
    assert_shown(jobs_verb("list", "--limit", "1").out)
    assert jobs_verb("list", "--json").out.isascii()
    for made in (job, job_id_from_content(key)):
        store.write(jobs.cancel, made)


def test_a_job_is_watched_to_its_end(jobs_verb: Run, job: str, service: tuple[str, Store, dict[str, Any]]):
    """1. Cancelled: exit code 3. 2. Resumed and complete: 0."""
    jobs_verb("cancel", job)
    cancelled = jobs_verb("watch", job)
    assert (cancelled.code, "cancelled" in cancelled.err) == (3, True)
    jobs_verb("resume", job)
    complete(service[1], job)
    completed = jobs_verb("watch", job)
    assert (completed.code, "completed: 2/2 samples" in completed.err) == (0, True)


@pytest.mark.parametrize("verb", ["show", "cancel", "resume", "rejects", "watch"])
def test_the_services_own_words_are_printed_for_what_it_refuses(jobs_verb: Run, verb: str):
    ran = jobs_verb(verb, UNKNOWN)
    assert (ran.code, ran.out) == (3, "")
    assert f"there is no job {UNKNOWN}" in ran.err


@pytest.mark.parametrize("place", ["nobody", "another"])
def test_a_server_that_does_not_answer_or_is_not_ours_is_told_with_a_cure(
    run: Run, service: tuple[str, Store, dict[str, Any]], place: str
):
    server = "http://127.0.0.1:9" if place == "nobody" else f"{service[0]}/nowhere"
    ran = run("jobs", "list", "--server", server)
    assert ran.code == 3
    assert ("quarry serve" if place == "nobody" else "error:") in ran.err
    assert "Traceback" not in ran.err


def test_a_job_file_is_submitted_and_its_shards_are_listed(
    run: Run, service: tuple[str, Store, dict[str, Any]], tmp_path: Path
):
    server, store, body = service
    file = tmp_path / "job.json"
    file.write_text(json.dumps(body))
    made = run("jobs", "submit", file, "--key", "by-file", "--json", "--server", server)
    job_id = json.loads(made.out)["id"]
    again = run("jobs", "submit", file, "--key", "by-file", "--priority", "1", "--server", server)
    assert again.out.split("\t")[:2] == [job_id, "queued"]
    for other in store.read(jobs.page, state=JobState.QUEUED)[0]:
        if other.id != job_id:
            store.write(jobs.cancel, other.id)
    complete(store, job_id)
    watched = run("jobs", "submit", file, "--key", "by-file", "--watch", "--json", "--server", server)
    assert [json.loads(line)["state"] for line in watched.out.splitlines()] == ["completed", "completed"]
    listed = [line.split("\t") for line in run("jobs", "files", job_id, "--server", server).out.splitlines()]
    assert [(path.rpartition("/")[2], place) for path, _, place in listed] == [
        ("train-00000.parquet", "data folder"),
        ("train-00001.parquet", "data folder"),
    ]


def test_a_schedule_by_its_commands(run: Run, service: tuple[str, Store, dict[str, Any]], tmp_path: Path):
    server, _, body = service
    file = tmp_path / "nightly.yaml"
    request = body | {"source": {"kind": "posted"}}
    new = {"name": "nightly", "cron": "0 3 * * *", "time_zone": "Asia/Tokyo", "request": request}
    file.write_text(json.dumps(new))
    (tmp_path / "samples.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')

    def schedules(verb: str, *arguments: object) -> str:
        ran = run("schedules", verb, *arguments, "--server", server)
        assert (ran.code, ran.err) == (0, "")
        return ran.out

    assert schedules("add", file, "--preview").count("next ") == 5
    assert schedules("list") == ""
    assert json.loads(schedules("add", file, "--json"))["name"] == "nightly"
    assert schedules("list").split("\t")[:3] == ["nightly", "active", "0 3 * * *"]
    assert "2 samples wait" in schedules("post", "nightly", tmp_path / "samples.jsonl")
    made = schedules("run", "nightly")
    assert " JST  submitted  j-" in made
    shown = schedules("show", "nightly")
    assert "run        " in shown and " 03:00 JST\n" in shown and "UTC" not in shown
    assert json.loads(schedules("show", "nightly", "--json"))["time_zone"] == "Asia/Tokyo"
    assert json.loads(schedules("show", "nightly", "--request"))["source"] == {"kind": "posted"}
    assert "paused" in schedules("pause", "nightly")
    assert "active" in schedules("resume", "nightly")
    assert schedules("check") == ""
    run("jobs", "cancel", made.split("  ")[2].rstrip(), "--server", server)
    failing = run("schedules", "check", "--server", server)
    assert (failing.code, failing.out.split("\t")[1]) == (3, "active, failing")
    file.write_text(json.dumps({"name": "nightly", "request": request | {"layers": [1]}}))
    other = run("schedules", "change", "other", file, "--server", server)
    assert (other.code, "field: name" in other.err) == (2, True)
    assert "0 3 * * *" in schedules("change", "nightly", file)
    assert json.loads(schedules("show", "nightly", "--request"))["layers"] == [1]
    file.write_text("cron: 0 4 * * *")
    assert "0 4 * * *" in schedules("change", "nightly", file)
    assert schedules("delete", "nightly") == "nightly\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n\n{bad\n', "line 3 is not JSON"),
        (b'{"text": "a"}\n\xff\n', "line 2 is not JSON"),
        (b"[1]\n", "line 1: Input should be"),
        (b'{"text": "a"}\n{"txt": "b"}\n', "line 2: txt: Extra inputs"),
        (b'{"text": "a", "loss_mask": [1]}\n', "line 1: "),
    ],
)
def test_a_sample_that_cannot_be_posted_is_named_by_its_line(
    run: Run, tmp_path: Path, content: bytes, said: str
):
    (tmp_path / "samples.jsonl").write_bytes(content)
    ran = run("schedules", "post", "nightly", tmp_path / "samples.jsonl", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert f"{tmp_path}/samples.jsonl, {said}" in ran.err and "cure:" in ran.err


@pytest.mark.slow
def test_a_file_is_posted_in_bodies_that_a_service_takes(
    run: Run, service: tuple[str, Store, dict[str, Any]], tmp_path: Path
):
    """Behind a byte order mark: many short samples, then some of 9 MB, more than a body may have."""
    server, _, body = service
    request = body | {"source": {"kind": "posted"}}
    (tmp_path / "big.json").write_text(json.dumps({"name": "big", "cron": "0 3 * * *", "request": request}))
    texts = [*map(str, range(1001)), *(f"{number}" * 30_000 for number in range(100, 200))]
    rows = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "samples.jsonl").write_text(rows, encoding="utf-8-sig")
    assert run("schedules", "add", tmp_path / "big.json", "--server", server).code == 0
    ran = run("schedules", "post", "big", tmp_path / "samples.jsonl", "--json", "--server", server)
    assert json.loads(ran.out) == {"samples": 1101}
    (tmp_path / "empty").touch()
    assert "0 samples" in run("schedules", "post", "big", tmp_path / "empty", "--server", server).out
    assert run("schedules", "delete", "big", "--server", server).code == 0


def test_every_answer_as_json_is_a_value_a_line(
    run: Run, service: tuple[str, Store, dict[str, Any]], job: str, tmp_path: Path
):
    server, store, body = service
    request = body | {"source": {"kind": "posted"}}
    (tmp_path / "job.json").write_text(json.dumps(body))
    (tmp_path / "new.json").write_text(json.dumps({"name": "new", "cron": "0 3 * * *", "request": request}))
    (tmp_path / "row.jsonl").write_text('{"text": "a"}')
    complete(store, job, rejects=2)
    made = json.loads(run("jobs", "submit", tmp_path / "job.json", "--json", "--server", server).out)["id"]
    verbs = [
        *(("jobs", verb, made) for verb in ("show", "pause", "cancel", "resume")),
        *(("jobs", verb, job) for verb in ("watch", "files", "rejects")),
        ("jobs", "show", job, "--request"),
        ("jobs", "list"),
        ("jobs", "priority", made, "-5"),
        ("jobs", "cancel", made),
        ("jobs", "delete", made),
        ("schedules", "add", tmp_path / "new.json"),
        ("schedules", "post", "new", tmp_path / "row.jsonl"),
        *(("schedules", verb, "new") for verb in ("show", "pause", "resume", "run")),
        ("schedules", "show", "new", "--request"),
        ("schedules", "list"),
        ("schedules", "delete", "new"),
        ("workers", "list"),
    ]
    for verb in verbs:
        ran = run(*verb, "--json", "--server", server)
        assert (ran.code, ran.err) == (0, ""), (verb, ran)
        assert all(isinstance(json.loads(line), dict) for line in ran.out.splitlines()), verb
        assert ran.out or verb == ("workers", "list"), verb


def test_one_unit_of_a_worker_is_not_units(run: Run, service: tuple[str, Store, dict[str, Any]], job: str):
    server, store, _ = service
    store.write(hosts.register, "a" * 32, "node", is_home=True)
    for name, held in (("one", 1), ("two", 2)):
        store.write(workers.beat, name, 60.0, status=WorkerStatus(job=job, units=held))
    printed = run("workers", "list", "--server", server).out
    assert f"\t1 unit of {job}" in printed and f"\t2 units of {job}" in printed


def test_a_name_that_leads_elsewhere_names_nothing(run: Run):
    for name in ("..", "."):
        ran = run("schedules", "show", name)
        assert (ran.code, "names nothing" in ran.err) == (3, True)


def test_the_version_is_printed(run: Run):
    ran = run("--version")
    assert (ran.code, ran.out.split()[0]) == (0, "quarry")


def test_a_state_of_a_newer_service_is_listed_as_it_was_sent(run: Run):
    job = job_summary().model_dump(mode="json") | {"state": "archived"}
    with answering({"/jobs?limit=200": (200, {"jobs": [job]})}) as server:
        assert run("jobs", "list", "--server", server).out.split("\t")[1] == "archived"
        assert json.loads(run("jobs", "list", "--json", "--server", server).out)["state"] == "archived"


class Restarting(BaseHTTPRequestHandler):
    """Says that a job runs, closes connections without an answer, and says that it is completed."""

    states = chain(("running",), repeat(None, 20), ("completed",))

    def do_GET(self) -> None:
        state = next(self.states)
        if state is not None:
            body = job_summary(JobState(state)).model_dump_json().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def test_a_job_is_followed_over_a_restart_of_the_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(clients, "POLL_S", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Restarting) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        with Quarry(f"http://127.0.0.1:{server.server_port}") as caller:
            followed = caller.follow(UNKNOWN)
            assert [job.state for job in followed] == [JobState.RUNNING, JobState.COMPLETED]
            assert len(caplog.messages) == 1 and caplog.messages[0].endswith("; waiting")
            monkeypatch.setattr(clients, "PATIENCE_S", 0.1)
            Restarting.states = chain(("running",), repeat(None))
            with pytest.raises(ProblemReceived):
                list(caller.follow(UNKNOWN))
        server.shutdown()
    with Quarry("http://127.0.0.1:9") as caller, pytest.raises(ProblemReceived):
        next(caller.follow(UNKNOWN))
