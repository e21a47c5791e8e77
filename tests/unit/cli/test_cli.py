"""The command line: what is printed where, and which exit code a script gets."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest

from schemas.job import JobState
from schemas.request import ExtractRequest
from service.cli.console import exit_code
from service.cli.files import unfinished_code
from service.cli.job_file import own_roots, read_job_file
from service.cli.processes import node_code
from service.control.submit import check
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
from service.plan.sources import open_source
from service.settings import Settings
from tests.support.api import (
    job_body,
    small_target,
)
from tests.support.reference_models import TinyModel
from tests.unit.cli.conftest import HOSTILE, Run, assert_shown

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
    ("codes", "told", "code"),
    [
        ([0, 6], None, 0),
        ([1, 0], None, 0),
        ([-9, 6], None, 6),
        ([-15, -15], SIGTERM, 143),
        ([-15, 0], SIGTERM, 0),
        ([0, 143], SIGTERM, 143),
        ([1, 143], SIGTERM, 143),
        ([6, 143], SIGTERM, 143),
        ([6, 143], SIGINT, 130),
        ([143, 143], SIGINT, 130),
        ([0, -9], SIGINT, 130),
    ],
)
def test_a_node_has_done_all_if_one_worker_has_and_none_was_cut_short(
    codes: list[int], told: int | None, code: int
):
    assert node_code(codes, told) == code


def test_ctrl_c_during_the_imports_prints_no_traceback():
    interrupted = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'service.cli.entry': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from service.cli import main\n"
        "main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", interrupted], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["extract"], ["serve", "--port", "x"], ["jobs", "show", "x"]]
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str]):
    assert run(*arguments).code == 2


def test_a_name_that_is_not_utf_8_is_refused_by_every_command(run: Run, dataset: Path, tmp_path: Path):
    """A traceback's exit code would say that the dataset is broken."""
    named = dataset.rename(tmp_path / "no \udcff text")
    for command in (["verify", named], ["extract", "job.json", "--out", named]):
        ran = run(*command)
        assert (ran.code, ran.out) == (2, "")
        assert "no \\udcff text' is not UTF-8" in ran.err
        assert "cure:" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", ""],
        ["publish", "", "a/b"],
        ["extract", "job.json", "--out="],
        ["estimate", "job.json", "--part", ""],
    ],
)
def test_an_empty_argument_is_not_taken_for_the_current_folder(
    run: Run, dataset: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
):
    monkeypatch.chdir(dataset)
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert "is a variable of the shell unset?" in ran.err


def test_a_value_that_ends_in_an_equals_sign_is_not_empty(run: Run):
    ran = run("jobs", "list", "--server=ftp://a/?b=")
    assert (ran.code, ran.out) == (2, "")
    assert "'ftp://a/?b=' is not the URL of a service" in ran.err


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


@pytest.mark.parametrize("name", ["job.yaml", "job.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00", b"null", b"model", b"\0"])
def test_a_job_file_without_fields_is_named(run: Run, tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    ran = run("estimate", tmp_path / name)
    assert (ran.code, f"{tmp_path}/{name}" in ran.err, "cure:" in ran.err) == (2, True, True)


def test_a_byte_order_mark_before_a_job_is_passed_over(tmp_path: Path):
    for name in ("job.json", "job.yaml"):
        (tmp_path / name).write_text(json.dumps(job_body(tmp_path)), encoding="utf-8-sig")
        assert read_job_file(tmp_path / name).model == str(tmp_path)


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


@pytest.mark.parametrize("path", ["i*/*.jsonl", "{0}/c*/in/a.jsonl", "{0}/**/*.jsonl", "../*/in/a.jsonl"])
def test_a_job_file_may_name_a_glob_wherever_it_could_name_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
):
    (tmp_path / "cwd" / "in").mkdir(parents=True)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "cwd" / "in" / "a.jsonl").write_text('{"text": "x"}\n')
    monkeypatch.chdir(tmp_path / "cwd")
    body = {"model": "org/model", "source": {"kind": "file", "path": path.format(tmp_path)}}
    request = ExtractRequest.model_validate(body)
    settings = own_roots(Settings(), request, tmp_path / "jobs" / "job.json")
    assert len(list(open_source(request.source, settings).listed().rows())) == 1


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("source.path", {"source": {"kind": "file", "path": "loop/a.jsonl"}}),
        ("source.path", {"source": {"kind": "file", "path": "loop/*.jsonl"}}),
        ("model", {"model": "./loop"}),
    ],
)
def test_a_job_file_that_names_a_loop_of_links_is_refused_by_its_field(
    run: Run, tmp_path: Path, job_file: Callable[..., Path], field: str, changes: dict[str, Any]
):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    ran = run("estimate", job_file(**changes))
    assert (ran.code, f"field: {field}" in ran.err) == (2, True)


def test_an_estimate_of_a_job_that_cannot_run_says_why(run: Run, job_file: Callable[..., Path]):
    ran = run("estimate", job_file(layers=[99]))
    assert (ran.code, "field: layers" in ran.err) == (2, True)


# Datasets


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_job_that_is_not_complete_is_told_with_exit_code_0(run: Run, dataset: Path):
    stored = dataset / "data" / "j-0000000000000000" / "train-00000.parquet"
    stored.parent.mkdir()
    stored.write_bytes(b"x")
    ran = run("verify", dataset)
    assert (ran.code, ran.out.splitlines()[-1]) == (0, "the dataset is right")
    assert (
        f"not complete: 1 job without a manifest, captured still or given up: {stored.parent.name}" in ran.out
    )
    assert json.loads(run("verify", dataset, "--json").out)["not_complete"] == [stored.parent.name]


@pytest.mark.slow
def test_a_dataset_whose_only_job_is_not_complete_is_told_with_exit_code_3(run: Run, dataset: Path):
    next(dataset.glob("manifests/*.json")).unlink()
    ran = run("verify", dataset)
    assert (ran.code, ran.out.splitlines()[-1]) == (3, "the dataset is not complete yet")
    assert json.loads(run("verify", dataset, "--json").out)["ok"] is False


def test_what_is_no_dataset_or_no_repository_is_wrong_usage(run: Run, tmp_path: Path, dataset: Path):
    verified = run("verify", tmp_path / "missing")
    assert (verified.code, "cure:" in verified.err) == (2, True)
    assert run("publish", tmp_path / "missing", "a/b").code == 2
    published = run("publish", dataset, "no-slash")
    assert (published.code, "field: repo_id" in published.err) == (2, True)


@pytest.mark.slow
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
