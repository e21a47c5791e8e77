"""The planner ends when it is asked to, whatever it is just doing: a signal is held back and asked for."""

import signal
import time
from pathlib import Path

import pytest

from service.settings import Settings
from service.store import Store, migration
from service.worker import PlannerProcess, wait_for_signal


@pytest.fixture
def held_back():
    """A signal that does nothing until somebody asks for it."""
    number = signal.SIGUSR2
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    yield number
    signal.sigtimedwait({number}, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def test_a_signal_ends_the_wait_and_stays_to_be_seen(held_back):
    signal.raise_signal(held_back)
    wait_for_signal(held_back, 60.0)
    assert held_back in signal.sigpending()
    wait_for_signal(held_back, 60.0)


def test_without_a_signal_the_time_is_waited_for(held_back):
    wait_for_signal(held_back, 0.01)
    assert held_back not in signal.sigpending()


def test_an_idle_planner_ends_in_order_when_it_is_stopped(tmp_path: Path):
    settings = Settings(data_dir=tmp_path, poll_s=60.0)
    store = Store(settings.database())
    store.write(migration.migrate)
    store.close()
    planner = PlannerProcess(settings)
    planner.start()
    process = planner._process
    assert process is not None and process.pid is not None
    # Nothing to plan: it sleeps in the kernel, for a minute if nobody comes. Not every kernel tells where.
    deadline = time.monotonic() + 30
    while "sigtimedwait" not in Path(f"/proc/{process.pid}/wchan").read_text():
        assert process.is_alive()
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    planner.stop()
    assert process.exitcode == 0
