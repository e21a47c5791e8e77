"""A worker as a child: its settings, its end, and what it leaves behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import worker
from service.settings import Settings, load_settings
from service.work.worker_process import JOB_ENDED_CODES, WorkerProcess
from tests.support.children import DRAINS, Output, python, wait_for_end

LEAVES_A_CHILD = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def output() -> Iterator[Output]:
    with Output.opened() as output:
        yield output


def ended(child: WorkerProcess) -> int:
    """Wait until the kernel says that a child has ended, and return its exit code."""
    wait_for_end(child.pid)
    code = child.exit_code()
    assert code is not None
    return code


TELLS_ITS_SETTINGS = """
import os, subprocess, sys
from service import worker
from service.cli import main

def tell(settings, **options):
    print(settings.with_secrets().decode(), flush=True)
    subprocess.run(["env"], check=True)
    return 0

worker.run_worker = tell
main(["worker", "--parent-pid", str(os.getppid())])
"""
"""Below the settings it prints what its own child inherits."""


def test_a_child_has_the_very_settings_of_its_parent_and_no_secret_in_an_environment(
    tmp_path: Path, output: Output, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("quarry_hub_token", "hf_secret")
    monkeypatch.setenv("QUARRY_DATABASE_URL", "postgresql+psycopg://me:password@host/name")
    given = load_settings(
        data_dir=tmp_path / "a folder",
        source_roots=(tmp_path, tmp_path / 'with "quotes", and commas'),
        engine_options={"seed": 3, "nothing": None, "compilation_config": {"custom_ops": ["none"]}},
        gpu_memory_utilization=0.5,
    ).model_copy(update={"lease_s": 7.0})
    monkeypatch.setenv("QUARRY_LEASE_S", "8")
    assert (given.token(), given.database()[-23:]) == ("hf_secret", "//me:password@host/name")
    assert "hf_secret" not in repr(given)
    assert ":password" not in repr(given)
    assert ended(WorkerProcess(python(TELLS_ITS_SETTINGS), given.with_secrets(), output.write)) == 0
    output.write.close()
    settings, environment = output.read.read().decode().split("\n", 1)
    assert Settings.model_validate_json(settings) == given
    assert "QUARRY_LEASE_S=8" in environment
    assert "hf_secret" not in environment
    assert ":password" not in environment


def test_the_codes_that_end_a_job_are_the_workers_own():
    assert {worker.EXIT_OK, worker.EXIT_JOB_NOT_COMPLETE} == set(JOB_ENDED_CODES)


@pytest.mark.parametrize("code", [0, 77])
def test_an_asked_child_ends_in_order_with_its_own_code(output: Output, code: int):
    """It is out of the terminal's reach, and nothing harms it when it has ended."""
    child = WorkerProcess(python(DRAINS.replace("exit(0)", f"exit({code})")), output=output.write)
    assert output.line() == "ready"
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    assert child.exit_code() is None
    child.terminate()
    assert ended(child) == code
    child.terminate()
    child.kill()
    assert child.exit_code() == code


def test_what_a_killed_worker_leaves_behind_is_ended_too(output: Output):
    """1. A worker starts a child and kills itself. 2. It is asked to end, too late. 3. The child ends."""
    child = WorkerProcess(python(LEAVES_A_CHILD), output=output.write)
    orphan = int(output.line())
    wait_for_end(child.pid)
    child.terminate()
    assert ended(child) == -9
    wait_for_end(orphan)
