"""What a disk refuses is told with file and cure, and with an exit code that is no verdict on a dataset."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.cli.console import naming
from tests.unit.cli.conftest import Run

ROOT = Path(__file__).parents[3]


def quarry(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process."""
    command = [sys.executable, "-m", "service.cli", *map(str, arguments)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, cwd=ROOT, text=True, check=False, **(streams | options))


def lines_of(stderr: str) -> list[str]:
    """Return what a refused command said, which is a problem and nothing else."""
    said = stderr.splitlines()
    assert [line[:8] for line in said] == ["error: " + said[0][7], "  cure: "], stderr
    return said


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_lacks_characters_gets_their_escapes(dataset, tmp_path, encoding):
    """A traceback's exit code would say that the dataset is broken."""
    folder = dataset.rename(tmp_path / "donn\u00e9es-\u6570\u636e")
    ran = quarry("verify", folder, env=os.environ | {"PYTHONIOENCODING": encoding}, encoding=encoding)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\\u6570\\u636e" in ran.stdout


@pytest.mark.parametrize("file", ["export.json", "shard-00000.bin"])
def test_an_export_to_a_full_disk_says_where_and_goes_on_with_room(run: Run, dataset, tmp_path, file):
    """1. A file is written to a device that is always full. 2. With room the same command ends it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / f".{file}.tmp").symlink_to("/dev/full")
    command = ("export", dataset, "--to", "deepspec", "--out", out)
    full = run(*command)
    assert (full.code, full.out) == (3, "")
    assert lines_of(full.err) == [
        f"error: The disk is full: {out}: No space left on device",
        "  cure:  make space there, then run the same command again",
    ]
    assert run(*command).code == 0
    assert json.loads((out / "export.json").read_text())["complete"] is True


def test_a_page_on_a_full_disk_is_a_file_that_could_not_be_written(run: Run, dataset, tmp_path):
    """It is no shard, and the same command does no better before somebody has made room."""
    page = tmp_path / "page.html"
    (tmp_path / ".page.html.tmp").symlink_to("/dev/full")
    ran = run("verify", dataset, "--report", page)
    assert (ran.code, ran.out.splitlines()[-1]) == (3, "the dataset is right")
    assert lines_of(ran.err) == [
        f"error: The disk is full: {page}: No space left on device",
        "  cure:  make space there, then run the same command again",
    ]
    assert not page.exists()


def test_a_file_that_cannot_be_opened_is_named(run: Run, dataset, tmp_path):
    lock = tmp_path / "out/.export.lock"
    lock.mkdir(parents=True)
    ran = run("export", dataset, "--to", "deepspec", "--out", tmp_path / "out")
    assert ran.code == 3
    assert lines_of(ran.err)[0] == f"error: Reading or writing failed: {lock}: Is a directory"


BAD_DISK = """
from schemas.dataset import seal
seal.sha256_of = lambda path, *_: open("/proc/self/mem", "rb", buffering=0).read(1)
"""
"""Reading its own memory from address 0 fails with the error of a bad disk."""


@pytest.mark.slow
def test_a_disk_that_cannot_be_read_is_no_broken_dataset(dataset, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BAD_DISK)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = quarry("verify", dataset, env=environment)
    assert (ran.returncode, ran.stderr) == (3, "")
    *_, said, verdict = ran.stdout.splitlines()
    assert said.endswith(": cannot be read: Input/output error")
    assert verdict.startswith("the dataset is not read whole: ")


@pytest.mark.slow
def test_a_server_that_cannot_make_its_folder_did_not_start(tmp_path):
    (tmp_path / "file").touch()
    ran = quarry("serve", "--data-dir", tmp_path / "file/data", "--port", "0")
    assert ran.returncode == 1
    assert f"{tmp_path}/file/data: Not a directory" in lines_of(ran.stderr)[0]


def test_a_worker_keeps_the_code_that_has_it_started_again_and_its_traceback(tmp_path):
    (tmp_path / "file").touch()
    environment = os.environ | {"QUARRY_ENGINE": "nowhere:Engine"}
    ran = quarry("worker", "--data-dir", tmp_path / "file/data", env=environment)
    assert ran.returncode == 1
    assert "Traceback" in ran.stderr


BUFFERED, UNBUFFERED = (os.environ | {"PYTHONUNBUFFERED": value} for value in ("", "1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "code"), [(BUFFERED, 0), (UNBUFFERED, 3)], ids=["when all is said", "in the middle"]
)
def test_output_that_nobody_reads_any_more_is_no_error_and_no_verdict(dataset, environment, code):
    unread, output = os.pipe()
    os.close(unread)
    try:
        ran = quarry("verify", dataset, stdout=output, env=environment)
    finally:
        os.close(output)
    assert (ran.returncode, ran.stderr) == (code, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_as_if_nobody_read_them(closed):
    command = f"exec {sys.executable} -m service.cli jobs show j-0 {closed}"
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False)
    version = subprocess.run(
        ["bash", "-c", command.replace("jobs show j-0", "--version")], cwd=ROOT, check=False
    )
    assert version.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("environment", [BUFFERED, UNBUFFERED], ids=["when all is said", "in the middle"])
def test_output_to_a_full_disk_is_told_once(dataset, environment):
    with Path("/dev/full").open("w") as full:
        ran = quarry("verify", dataset, "--json", stdout=full, env=environment)
    assert ran.returncode == 3
    assert lines_of(ran.stderr)[0] == "error: The disk is full: standard output: No space left on device"


def test_an_error_that_names_a_file_or_is_a_librarys_own_is_left_as_it_is(tmp_path):
    for error in (OSError(errno.EACCES, "Permission denied", "elsewhere"), OSError("no such tokenizer")):
        before = str(error)
        with pytest.raises(OSError) as told, naming(tmp_path):
            raise error
        assert str(told.value) == before
