"""`quarry extract` as a batch system runs it: a process with an exit code, on the tests' engine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.dataset.manifest import Manifest
from service.cli import main
from service.proof.verify import verify_dataset
from service.store import Store, jobs
from tests.support.children import wait_for_end, workers_of
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault, Token
from tests.support.tiny_model import random_target

ROOT = Path(__file__).parents[2]
SAMPLES = [
    {"id": "a", "text": "the quick brown fox"},
    {"id": "b", "token_ids": [1, 2, 3, 4, 5]},
    {"id": "silent", "messages": [{"role": "user", "content": "no answer follows"}]},
]
"""Two that are written and one that is rejected: nothing of it is supervised."""
LONG_S = "600"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and a job file that names target and source by their relative paths."""
    folder = tmp_path_factory.mktemp("extract")
    random_target(folder / "model", layers=4, hidden=64)
    lines = "".join(json.dumps(sample) + "\n" for sample in SAMPLES)
    (folder / "samples.jsonl").write_text(lines)
    write_job(folder, source={"kind": "file", "path": "samples.jsonl", "seed": 7})
    return folder


def write_job(folder: Path, name: str = "job.json", **changes: Any) -> Path:
    source = {"kind": "file", "path": "samples.jsonl"}
    body = {"model": "./model", "layers": [1, 2], "canary": "skip", "source": source} | changes
    (folder / name).write_text(json.dumps(body))
    return folder / name


def environment(**settings: str) -> dict[str, str]:
    """Return the environment of a run; the data folder, database and roles in it must not be used."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "QUARRY_ENGINE": "tests.support.fake_engine:FakeEngine",
        "QUARRY_DATA_DIR": "/nowhere",
        "QUARRY_DATABASE_URL": "sqlite:////nowhere/at/all.db",
        "QUARRY_ROLES": '["capture", "store"]',
        **settings,
    }


def command(job: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "service.cli", "extract", str(job), "--out", str(out), *options]


def extract(job: Path, out: Path, *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, in a folder that is not the job file's."""
    return subprocess.run(
        command(job, out, *options),
        cwd=out.parent,
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@contextmanager
def running(job: Path, out: Path, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run and wait until its job does; kill it in the end if it still lives."""
    child = subprocess.Popen(
        command(job, out), cwd=out.parent, env=environment(**settings), stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    try:
        seen = []
        for line in child.stderr:
            seen.append(line)
            if line.startswith("running: ") and "/3 samples" in line:
                break
        assert child.poll() is None, seen
        yield child
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


@pytest.fixture(scope="module")
def complete(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that ended well, the job's own way of saying so checked."""
    out = tmp_path_factory.mktemp("out") / "dataset"
    done = extract(folder / "job.json", out)
    assert done.returncode == 0, done.stderr
    assert "completed: 2/3 samples, 1 rejected" in done.stderr
    assert "2/3 samples" in done.stdout
    assert "1 rejected" in done.stdout
    return out


@pytest.fixture
def extract_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return what runs the command in this process, which is quicker where no worker is started.

    It returns the exit code and what is on stderr. There is no engine: a worker could run nothing.
    """

    def run(job: Path, out: Path, *options: str) -> tuple[int, str]:
        for name, value in environment(QUARRY_ENGINE="no.such:Engine").items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(out.parent)
        with pytest.raises(SystemExit) as ended:
            main(["extract", str(job), "--out", str(out), *options])
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def manifest_of(out: Path) -> Manifest:
    (path,) = (out / "manifests").glob("*.json")
    return Manifest.model_validate_json(path.read_bytes())


@pytest.mark.slow
def test_a_run_leaves_exactly_the_dataset(complete: Path):
    manifest = manifest_of(complete)
    named = {entry.path for entry in (*manifest.shards, *manifest.indexes, *manifest.extras)}
    found = {path.relative_to(complete).as_posix() for path in complete.rglob("*") if path.is_file()}
    assert named < found
    beside = {"README.md", "jobs.json", "manifests", ".gitattributes"}
    assert {path.partition("/")[0] for path in found - named} <= beside
    assert (manifest.totals.samples_written, manifest.totals.samples_rejected) == (2, 1)
    report = verify_dataset(complete)
    assert report.ok, report.findings


def test_a_run_again_on_a_complete_folder_changes_nothing(folder: Path, complete: Path, extract_here):
    before = {path: path.stat().st_mtime_ns for path in complete.rglob("*")}
    assert extract_here(folder / "job.json", complete)[0] == 0
    assert {path: path.stat().st_mtime_ns for path in complete.rglob("*")} == before


def test_rejected_samples_are_a_failure_only_where_that_is_asked_for(
    folder: Path, complete: Path, extract_here
):
    assert extract_here(folder / "job.json", complete, "--strict")[0] == 3


@pytest.mark.slow
def test_a_folder_with_another_jobs_dataset_is_refused(folder: Path, complete: Path, extract_here):
    code, said = extract_here(write_job(folder, "other.json", layers=[3]), complete)
    assert (code, "--out" in said) == (2, True)


def test_a_folder_with_files_of_others_is_refused_and_left_alone(folder: Path, tmp_path: Path, extract_here):
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.tex").write_text("words")
    assert extract_here(folder / "job.json", out)[0] == 2
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_a_request_that_cannot_run_leaves_no_trace(folder: Path, tmp_path: Path, extract_here):
    code, said = extract_here(write_job(folder, "wrong.json", layers=[99]), tmp_path / "out")
    assert code == 2
    assert "field: layers" in said and "cure:" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_stopped_run_says_by_which_signal_and_goes_on_when_run_again(
    folder: Path, tmp_path: Path, number: signal.Signals
):
    """1. A run of many minutes is stopped. 2. Another job is refused its folder. 3. Run again, it ends."""
    out = tmp_path / "out"
    with running(folder / "job.json", out, QUARRY_FAKE_STEP_S=LONG_S, QUARRY_DRAIN_S="0") as child:
        child.send_signal(number)
        assert child.wait(120) == 128 + number
    other = extract(write_job(folder, "other.json", layers=[3]), out)
    assert (other.returncode, "another job" in other.stderr) == (2, True)
    done = extract(folder / "job.json", out)
    assert done.returncode == 0, done.stderr
    assert not (out / ".quarry").exists()
    assert manifest_of(out).totals.samples_written == 2


@pytest.mark.slow
def test_two_runs_in_one_folder_are_refused(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    with running(folder / "job.json", out, QUARRY_FAKE_STEP_S=LONG_S, QUARRY_DRAIN_S="0"):
        second = extract(folder / "job.json", out)
    assert (second.returncode, "another run" in second.stderr) == (2, True)


@pytest.mark.slow
def test_a_killed_run_takes_its_worker_with_it_and_is_taken_up_again(folder: Path, tmp_path: Path):
    """1. The run is killed with no chance to clean up. 2. Its worker ends too. 3. Run again, it ends well."""
    out = tmp_path / "out"
    with running(folder / "job.json", out, QUARRY_FAKE_STEP_S=LONG_S, QUARRY_DRAIN_S="0") as child:
        (worker,) = workers_of(child.pid)
        child.kill()
        child.wait()
        wait_for_end(worker)
    done = extract(folder / "job.json", out, QUARRY_LEASE_S="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_job_that_fails_is_told_by_problem_and_exit_code(folder: Path, tmp_path: Path):
    out = tmp_path / "out"
    empty = write_job(folder, "empty.json", source={"kind": "file", "path": "nothing.jsonl"})
    (folder / "nothing.jsonl").write_text("\n")
    done = extract(empty, out)
    assert done.returncode == 3, done.stderr
    assert "error: " in done.stderr
    store = Store(f"sqlite:///{out / '.quarry' / 'quarry.db'}")
    (row,) = store.read(jobs.page)[0]
    store.close()
    assert row.state == "failed"


@pytest.mark.parametrize(
    ("role", "reachable", "code"), [("read", True, 5), ("write", False, 75)], ids=["blocked", "try again"]
)
def test_a_hub_that_refuses_or_does_not_answer_is_told_apart(
    folder: Path, tmp_path: Path, extract_here, monkeypatch: pytest.MonkeyPatch, role, reachable, code
):
    with FakeHub() as hub:
        hub.add_token("hf_1", Token("me", role=role))
        monkeypatch.setenv("QUARRY_HUB_ENDPOINT", hub.url)
        monkeypatch.setenv("QUARRY_HUB_TOKEN", "hf_1")
        if not reachable:
            hub.fail("whoami", Fault(status=503, times=10_000))
        job = write_job(folder, "pushed.json", hub={"repo_id": "me/states"})
        assert extract_here(job, tmp_path / "out")[0] == code
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_job_whose_dataset_the_repository_holds_is_not_captured_again(
    folder: Path, tmp_path: Path, extract_here, monkeypatch: pytest.MonkeyPatch
):
    """1. A run pushes. 2. The same job, in another folder and with no engine, ends well and makes nothing."""
    job = write_job(folder, "pushed.json", hub={"repo_id": "org/states", "private": False})
    with FakeHub() as hub:
        hub.add_token("hf_1", Token("me", orgs={"org": "write"}))
        monkeypatch.setenv("QUARRY_HUB_ENDPOINT", hub.url)
        monkeypatch.setenv("QUARRY_HUB_TOKEN", "hf_1")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        done = extract(job, tmp_path / "first")
        assert done.returncode == 0, done.stderr
        pushed = hub.repo("org/states").head
        assert extract_here(job, tmp_path / "second")[0] == 0
        assert hub.repo("org/states").head is pushed
    assert not (tmp_path / "second").exists()
