"""The command line: what is printed where, and which exit code a script gets."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from schemas.job import JobState
from schemas.names import job_id_from_content
from schemas.request import ExtractRequest
from service import client
from service.cli.console import exit_code
from service.cli.files import unfinished_code
from service.cli.job_file import own_roots, read_job_file
from service.control.submit import check, new_key
from service.errors import (
    DatasetBroken,
    DiskFull,
    EngineDied,
    EngineStuck,
    HubDenied,
    HubUnavailable,
    IdentityChanged,
    OptionRefused,
    PlanningDied,
    QuarryError,
    SourceRefused,
    StatesWrong,
    StoreUnavailable,
    WriteFailed,
)
from service.settings import Settings
from service.store import NewJob, Store, jobs, plans
from tests.support.api import (
    UNKNOWN,
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
from tests.support.reference_models import TinyModel
from tests.unit.cli.conftest import Run

ROOT = Path(__file__).parents[3]


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "job.json", **changes: Any) -> Path:
        body = job_body(small_target(tmp_path / "model")) | changes
        (tmp_path / name).write_text(json.dumps(body))
        return tmp_path / name

    return write


# The whole


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [
        (JobState.FAILED, StatesWrong("row 3"), 3),
        (JobState.FAILED, SourceRefused("every sample was rejected"), 3),
        (JobState.FAILED, None, 3),
        (JobState.FAILED, WriteFailed("of three attempts each"), 75),
        (JobState.RUNNING, EngineDied("the worker ended before the job did"), 75),
        (JobState.BLOCKED, EngineDied("on this machine"), 75),
        (JobState.BLOCKED, EngineStuck("on this machine"), 75),
        (JobState.BLOCKED, DiskFull("no space"), 5),
        (JobState.BLOCKED, PlanningDied("three times"), 5),
    ],
)
def test_an_unfinished_runs_exit_code_says_whether_to_run_it_again(
    state: JobState, error: QuarryError | None, code: int
):
    assert unfinished_code(state, error.problem() if error else None) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DatasetBroken("a"), 1),
        (OptionRefused("a"), 2),
        (IdentityChanged("a"), 3),
        (StoreUnavailable("a"), 3),
        (HubDenied("a"), 5),
        (DiskFull("a"), 5),
        (HubUnavailable("a"), 75),
        (PlanningDied("a"), 75),
    ],
)
def test_an_errors_exit_code_says_whether_the_command_may_succeed_later(error: QuarryError, code: int):
    assert exit_code(error) == code


def test_help_names_every_verb_and_needs_no_engine():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "service.cli", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for verb in ("serve", "worker", "estimate", "extract", "verify", "publish", "jobs"):
        assert f"\n  {verb} " in done.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "vllm", "transformers", "datasets", "pyarrow", "sqlalchemy"})


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["extract"], ["serve", "--port", "x"], ["jobs", "show", "x"]]
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str]):
    assert run(*arguments).code == 2


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("QUARRY_PORT", "99999", ["field: port", "QUARRY_PORT"]),
        ("QUARRY_LEASE_S", "soon", ["field: lease_s", "QUARRY_LEASE_S"]),
        ("QUARRY_SOURCE_ROOTS", "/data", ["source_roots", "JSON"]),
    ],
)
def test_a_wrong_setting_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: list[str]
):
    monkeypatch.setenv(variable, value)
    ran = run("worker")
    assert (ran.code, [word in ran.err for word in words]) == (2, [True, True])
    assert "Traceback" not in ran.err


# Job files


@pytest.mark.parametrize("verb", [["estimate"], ["extract", "--out", "out"]])
@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ('{"model": "a/b", "source": {"kind": "inline"}}', "field: source.samples")],
)
def test_a_job_file_that_is_wrong_is_told_by_field(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str], text: str, said: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.json").write_text(text)
    ran = run(*verb, tmp_path / "job.json")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "cure:" in ran.err
    assert not (tmp_path / "out").exists()


def test_yaml_and_json_are_the_same_job(tmp_path: Path):
    (tmp_path / "job.json").write_text(json.dumps(job_body(tmp_path)))
    (tmp_path / "job.yaml").write_text(
        f"model: {tmp_path}\nlayers: [1, 2]\nloss: all\nsource:\n  kind: inline\n  samples:\n"
        "    - {id: a, text: the quick brown fox}\n    - id: b\n      token_ids: [1, 2, 3]\n"
    )
    assert read_job_file(tmp_path / "job.yaml") == read_job_file(tmp_path / "job.json")


@pytest.mark.parametrize("text", ["a: [", "a: !!python/object:os.system {}", "{" * 3000, "2024-99-99"])
def test_yaml_that_cannot_be_read_is_a_wrong_job_file(run: Run, tmp_path: Path, text: str):
    (tmp_path / "job.yaml").write_text(text)
    assert run("estimate", tmp_path / "job.yaml").code == 2


def test_a_job_file_may_name_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The roots of the service hold for what strangers send; who runs a file can read these files anyway."""
    monkeypatch.chdir("/")
    folder = tmp_path / "jobs"
    small_target(folder / "model")
    (tmp_path / "samples.jsonl").write_text('{"text": "x"}\n')
    source = {"kind": "file", "path": "../samples.jsonl"}
    (folder / "job.json").write_text(json.dumps(job_body(folder, source=source) | {"model": "./model"}))
    request = read_job_file(folder / "job.json")
    assert request.model == str(folder / "model")
    check(request, own_roots(Settings(), request, folder / "job.json"))


def test_an_estimate_of_a_job_that_cannot_run_says_why(run: Run, job_file: Callable[..., Path]):
    ran = run("estimate", job_file(layers=[99]))
    assert (ran.code, "field: layers" in ran.err) == (2, True)


# Datasets


def test_a_right_dataset_is_verified_with_exit_code_0(run: Run, dataset: Path, model: TinyModel):
    ran = run("verify", dataset)
    assert (ran.code, "the dataset is right" in ran.out) == (0, True)
    with_logits = run("verify", dataset, "--model", model.folder)
    assert (with_logits.code, "2 of 2 rows agree" in with_logits.out) == (0, True)
    as_json = run("verify", dataset, "--json")
    assert json.loads(as_json.out)["ok"] is True


def test_a_broken_dataset_is_told_with_exit_code_1(run: Run, dataset: Path):
    shard = next(dataset.glob("data/*/*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1])
    ran = run("verify", dataset)
    assert (ran.code, shard.name in ran.out) == (1, True)
    assert json.loads(run("verify", dataset, "--json").out)["ok"] is False


def test_what_is_no_dataset_or_no_repository_is_wrong_usage(run: Run, tmp_path: Path, dataset: Path):
    verified = run("verify", tmp_path / "missing")
    assert (verified.code, "cure:" in verified.err) == (2, True)
    assert run("publish", tmp_path / "missing", "a/b").code == 2
    published = run("publish", dataset, "no-slash")
    assert (published.code, "field: repo_id" in published.err) == (2, True)


HOSTILE = "\x1b[2J\x1b[9A\u202e\x9b1A\nthe dataset is right"
"""A name that clears a terminal's screen, goes up, turns the line round, and begins another."""


def assert_shown(printed: str) -> None:
    """Check that `HOSTILE` is in what was printed, and can do nothing there."""
    assert "<U+001B>[2J<U+001B>[9A<U+202E><U+009B>1A<U+000A>the dataset is right" in printed
    assert not set("\x1b\u202e\x9b") & set(printed)
    assert "the dataset is right" not in printed.splitlines()


def test_a_files_name_does_not_change_the_verdict_over_its_dataset(run: Run, tmp_path: Path, dataset: Path):
    shutil.copytree(dataset, tmp_path / "copy")
    (tmp_path / "copy" / "data" / f"{HOSTILE}.parquet").write_bytes(b"")
    ran = run("verify", tmp_path / "copy")
    assert (ran.code, ran.out.splitlines()[-1]) == (1, "the dataset is BROKEN: 1 error")
    assert_shown(ran.out)
    told = run("verify", tmp_path / "copy", "--json").out
    assert told.isascii()
    assert HOSTILE in json.loads(told)["findings"][0]["path"]


def test_a_name_in_an_error_is_shown(run: Run, job_file: Callable[..., Path]):
    ran = run("estimate", job_file(model=f"/{HOSTILE}"))
    assert ran.code == 2
    assert "'/\\x1b[2J" in ran.err  # this error quotes what was sent
    ran = run("export", HOSTILE, "--to", "eagle", "--out", "out")
    assert ran.code == 2
    assert_shown(ran.err)


def test_a_name_in_a_log_line_is_shown():
    code = f"import logging; from service.logs import *; log_to_stderr(); logging.error({HOSTILE!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<U+001B>[2J<U+001B>[9A<U+202E><U+009B>1A\n" in done.stderr


# The jobs of a running service


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
    key = new_key()
    job_id = job_id_from_content(key)
    store.write(jobs.submit, NewJob.of(job_id, key, ExtractRequest.model_validate(body)))
    return job_id


def test_jobs_are_listed_shown_cancelled_and_resumed(jobs_verb: Run, job: str):
    assert job in jobs_verb("list").out
    assert json.loads(jobs_verb("list", "--json").out.splitlines()[0])["id"] == job
    assert json.loads(jobs_verb("show", job).out)["state"] == "queued"
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
    key = new_key()
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


class Restarting(BaseHTTPRequestHandler):
    """Says that a job runs, closes two connections without an answer, and says that it is completed."""

    states = iter(("running", None, None, "completed"))

    def do_GET(self) -> None:
        state = next(self.states)
        if state is not None:
            body = job_summary(JobState(state)).model_dump_json().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def test_a_job_is_followed_over_a_restart_of_the_service(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "POLL_S", 0.01)
    with ThreadingHTTPServer(("127.0.0.1", 0), Restarting) as server:
        Thread(target=server.serve_forever).start()
        with client.Client(f"http://127.0.0.1:{server.server_port}") as caller:
            followed = [job.state for job in caller.follow(UNKNOWN)]
        server.shutdown()
    assert followed == [JobState.RUNNING, JobState.COMPLETED]
    with client.Client("http://127.0.0.1:9") as caller, pytest.raises(client.ProblemReceived):
        next(caller.follow(UNKNOWN))
