"""A worker as a child: its settings, its end, what it leaves behind, and how often it is started."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from service import worker
from service.settings import Settings
from service.supervisor import Supervisor
from service.worker_process import (
    JOB_ENDED_CODES,
    MAX_FAST_CRASHES,
    Restarts,
    WorkerProcess,
    settings_environment,
)

STOP_GRACE_S = 60.0
DRAINS = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready", flush=True)
while True:
    signal.pause()
"""
"""A worker that ends in order when it is asked to."""
IGNORES = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
)
LEAVES_A_CHILD = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "output"


def wait_for(path: Path, text: str, deadline_s: float = 60.0) -> str:
    """Return what is in a file once `text` is."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if path.exists() and text in (found := path.read_text()):
            return found
        time.sleep(0.02)
    raise AssertionError(f"{text!r} never came; there was {path.read_text()!r}")


def ended(worker_process: WorkerProcess, deadline_s: float = 60.0) -> int:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if (code := worker_process.exit_code()) is not None:
            return code
        time.sleep(0.02)
    raise AssertionError("it lives")


# Settings


def test_a_child_reads_the_very_settings_of_its_parent(tmp_path: Path):
    given = Settings(
        data_dir=tmp_path / "a folder",
        out_dir=tmp_path,
        source_roots=(tmp_path, tmp_path / 'with "quotes", and commas'),
        hub_token=SecretStr("hf_secret"),
        engine_options={"enforce_eager": True, "seed": 3, "nothing": None},
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
    assert JOB_ENDED_CODES == {worker.EXIT_OK, worker.EXIT_JOB_NOT_COMPLETE}


# One child


@pytest.mark.parametrize("code", [0, 3, 77])
def test_an_exit_code_is_told(code: int):
    assert ended(WorkerProcess(python(f"raise SystemExit({code})"), os.environ)) == code


def test_an_asked_child_ends_in_order(output: Path):
    with output.open("wb") as file:
        child = WorkerProcess(python(DRAINS), os.environ, file)
        wait_for(output, "ready")
        assert child.exit_code() is None
        child.terminate()
        assert ended(child) == 0
    child.terminate()
    child.kill()


def test_a_child_that_does_not_listen_is_killed(output: Path):
    with output.open("wb") as file:
        child = WorkerProcess(python(IGNORES), os.environ, file)
        wait_for(output, "ready")
        child.kill()
        assert ended(child) == -9


def test_what_a_killed_worker_leaves_behind_is_ended_too(output: Path):
    """1. A worker starts a child. 2. The worker is killed. 3. When its code is told, the child is gone."""
    with output.open("wb") as file:
        child = WorkerProcess(python(LEAVES_A_CHILD), os.environ, file)
        orphan = int(wait_for(output, "\n"))
        watch = os.pidfd_open(orphan)
        assert ended(child) == -9
    import select

    assert select.select([watch], [], [], 60)[0] == [watch]
    os.close(watch)


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


# The supervisor


def supervised(code: str, output: Path, **options: object) -> Supervisor:
    """Return a supervisor of workers that append to `output`."""
    return Supervisor(python(code), os.environ, STOP_GRACE_S, output=output.open("ab"), **options)


def test_a_supervisor_ends_when_a_workers_work_is_done(output: Path):
    supervisor = supervised("raise SystemExit(3)", output, last_codes=JOB_ENDED_CODES)
    supervisor.start()
    supervisor.join(60)
    assert not supervisor.is_alive()
    assert not supervisor.gave_up.is_set()


def test_a_stopped_supervisor_ends_its_worker_in_order(output: Path):
    supervisor = supervised(DRAINS + "\n", output)
    supervisor.start()
    wait_for(output, "ready")
    supervisor.stop()
    supervisor.join(60)
    assert not supervisor.is_alive()
    assert not supervisor.gave_up.is_set()


def test_a_worker_that_does_not_drain_in_its_grace_is_killed(output: Path):
    supervisor = Supervisor(python(IGNORES), os.environ, 0.0, output=output.open("ab"))
    supervisor.start()
    wait_for(output, "ready")
    supervisor.stop()
    supervisor.join(60)
    assert not supervisor.is_alive()


def test_a_worker_that_was_killed_is_started_again(output: Path):
    code = (
        f"import os, signal, pathlib; path = pathlib.Path({str(output)!r} + '.lives')\n"
        "lives = int(path.read_text()) if path.exists() else 0\n"
        "path.write_text(str(lives + 1))\n"
        "os.kill(os.getpid(), signal.SIGKILL) if lives == 0 else None\n"
    )
    supervisor = supervised(code, output, last_codes=frozenset({0}))
    supervisor.start()
    supervisor.join(60)
    assert not supervisor.is_alive()
    assert Path(f"{output}.lives").read_text() == "2"


def test_a_supervisor_gives_up_on_a_worker_that_cannot_live(output: Path):
    told: list[str] = []
    code = "print('born', flush=True); raise SystemExit(9)"
    supervisor = supervised(code, output, on_giving_up=lambda: told.append("given up"))
    supervisor.start()
    supervisor.join(120)
    assert supervisor.gave_up.is_set()
    assert told == ["given up"]
    assert output.read_text().count("born") == MAX_FAST_CRASHES
