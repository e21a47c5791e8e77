"""A process beside the captures ends when it is asked to: a signal is held back and asked for."""

import signal
import time
from pathlib import Path

import pytest

from service.settings import Settings
from service.store import Store, migration
from service.work.task_loop import TaskLoop, terminated, wait_for_termination
from tests.support.roles import PLANNING


@pytest.fixture
def held_back():
    """SIGTERM does nothing until somebody asks for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    yield
    signal.sigtimedwait({signal.SIGTERM}, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@pytest.mark.usefixtures("held_back")
def test_a_signal_ends_the_wait_and_stays_to_be_seen():
    wait_for_termination(0.01)
    assert not terminated()
    signal.raise_signal(signal.SIGTERM)
    for _ in range(2):
        wait_for_termination(60.0)
        assert terminated()


def test_an_idle_planner_ends_in_order_when_it_is_stopped(tmp_path: Path):
    settings = Settings(data_dir=tmp_path, poll_s=60.0)
    store = Store(settings.database())
    store.write(migration.migrate)
    store.close()
    with TaskLoop("planner", PLANNING, settings) as planner:
        process = planner.running
        # Nothing to plan: it sleeps in the kernel, for a minute if nobody comes. Not every kernel says so.
        deadline = time.monotonic() + 30
        while "sigtimedwait" not in Path(f"/proc/{process.pid}/wchan").read_text():
            assert process.is_alive()
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    assert process.exitcode == 0
