"""A process beside the captures ends when it is asked to: its signal is held back and waited for."""

import time
from pathlib import Path

from service.settings import Settings
from service.store import Store, migration
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
