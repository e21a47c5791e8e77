"""A worker as a child: its settings, its end, what it leaves behind, and when it is started again."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from service import worker
from service.api.worker_process import (
    JOB_ENDED_CODES,
    MAX_FAST_CRASHES,
    Restarts,
    WorkerProcess,
    settings_environment,
)
from service.settings import Settings
from tests.support.children import DRAINS, IGNORES, Output, python, wait_for_end

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


# Settings


def test_a_child_reads_the_very_settings_of_its_parent(tmp_path: Path):
    given = Settings(
        data_dir=tmp_path / "a folder",
        out_dir=tmp_path,
        source_roots=(tmp_path, tmp_path / 'with "quotes", and commas'),
        hub_token=SecretStr("hf_secret"),
        engine_options={"seed": 3, "nothing": None, "compilation_config": {"custom_ops": ["none"]}},
        gpu_memory_utilization=0.5,
        logit_rows_min=0,
    )
    inherited = os.environ | {"QUARRY_DATABASE_URL": "sqlite:///elsewhere.db", "QUARRY_PORT": "1"}
    code = (
        "from service.settings import Settings; s = Settings(); "
        "print(s.model_dump_json()); print(s.hub_token.get_secret_value())"
    )
    environment = settings_environment(given, inherited)
    done = subprocess.run(python(code), env=environment, capture_output=True, text=True, check=True)
    settings, token = done.stdout.splitlines()
    assert json.loads(settings) == json.loads(given.model_dump_json())
    assert token == "hf_secret"


def test_variables_that_are_no_settings_are_inherited():
    environment = settings_environment(
        Settings(), {"PATH": "/bin", "QUARRY_FAKE_STEP_S": "1", "quarry_port": "7"}
    )
    assert environment["PATH"] == "/bin"
    assert environment["QUARRY_FAKE_STEP_S"] == "1"
    assert "quarry_port" not in environment


def test_the_codes_that_end_a_job_are_the_workers_own():
    assert {worker.EXIT_OK, worker.EXIT_JOB_NOT_COMPLETE} == set(JOB_ENDED_CODES)


# One child


@pytest.mark.parametrize("code", [0, 3, 77])
def test_an_exit_code_is_told(code: int):
    assert ended(WorkerProcess(python(f"raise SystemExit({code})"), os.environ)) == code


def test_an_asked_child_ends_in_order(output: Output):
    child = WorkerProcess(python(DRAINS), os.environ, output.write)
    assert output.line() == "ready"
    assert child.exit_code() is None
    child.terminate()
    assert ended(child) == 0
    child.terminate()
    child.kill()
    assert child.exit_code() == 0


def test_a_child_that_does_not_listen_is_killed(output: Output):
    child = WorkerProcess(python(IGNORES), os.environ, output.write)
    assert output.line() == "ready"
    child.kill()
    assert ended(child) == -9


def test_what_a_killed_worker_leaves_behind_is_ended_too(output: Output):
    """1. A worker starts a child. 2. The worker kills itself. 3. When its code is told, the child ends."""
    child = WorkerProcess(python(LEAVES_A_CHILD), os.environ, output.write)
    orphan = int(output.line())
    assert ended(child) == -9
    wait_for_end(orphan)


def test_a_child_is_out_of_the_terminals_reach():
    child = WorkerProcess(python("import time; time.sleep(600)"), os.environ)
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    child.kill()
    ended(child)


# Restarts


def test_a_worker_that_lived_long_is_started_again_at_once_for_ever():
    restarts = Restarts()
    for _ in range(100):
        restarts = restarts.after(lived_s=3600.0)
        assert (restarts.delay_s, restarts.exhausted) == (0.0, False)


def test_fast_crashes_are_waited_for_longer_and_longer_and_given_up_in_the_end():
    restarts, delays = Restarts(), []
    while not restarts.exhausted:
        restarts = restarts.after(lived_s=0.1)
        delays.append(restarts.delay_s)
    assert len(delays) == MAX_FAST_CRASHES
    assert delays == sorted(set(delays))


def test_one_long_life_forgives_the_crashes_before_it():
    restarts = Restarts().after(0.1).after(0.1).after(3600.0)
    assert restarts == Restarts()
