"""A process beside the captures ends when it is asked to: its signal is held back and waited for."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.settings import Settings
from service.store import Store, migration
from service.work import task_loop
from service.work.keeper import Keeper
from service.work.task_loop import TaskLoop
from tests.support.roles import PLANNING


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


released = threading.Event()


def held_up(*_: object) -> bool:
    """Stand for a step that takes longer than any stop: an upload to a Hub that does not answer."""
    return not released.wait(60.0)


def test_loops_that_are_stopped_together_are_waited_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one's wait took is not waited for again."""
    monkeypatch.setattr(task_loop, "STOP_S", 1.0)
    settings = Settings(data_dir=tmp_path)
    store = Store(settings.database())
    waited_s: list[float] = []
    with ExitStack() as running:
        loops = [
            running.enter_context(
                TaskLoop("publisher", f"{__name__}:held_up", settings, (store, Keeper(store, 60.0)))
            )
            for _ in range(6)
        ]
        for loop in loops:
            running.callback(loop.stop)
            join = loop.running.join
            monkeypatch.setattr(loop.running, "join", lambda s, join=join: (waited_s.append(s), join(s)))
    released.set()
    monkeypatch.undo()
    for loop in loops:
        loop.running.join()
    store.close()
    assert len(waited_s) == 6 and sum(waited_s[1:]) < waited_s[0]
