"""A fault at the n-th file or database call of plan, seal, commit, landing and completion.

A life of the service meets the fault: SIGKILL, EIO, ENOSPC, or SIGSTOP for longer than its leases. Then it is
started again until the job is complete, and nothing else is done. A job that a full disk blocked is resumed,
which is what its error asks for. In the end the dataset has the names and the bytes of an undisturbed run.
"""

import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.settings import Settings
from tests.crash.conftest import chosen
from tests.crash.faults import COMPLETED, FAILED, LOOK_S, MEETS, Fault, Life, build_shim, calls, open_server
from tests.crash.oracle import JOB, assert_right, make_target, service, submit, tree

STAGES = {
    "plan": ("plan", "work/.+"),
    "plan-database": ("plan", "/quarry[.]db"),
    "seal": ("capture", "/attempts(/[^/]+(/[.]?train[^/]+)?)?$"),
    "index": ("capture", "/[.]?index[.]parquet"),
    "commit": ("capture", "/quarry[.]db"),
    "landing": ("capture", "/jobs"),
    "complete": ("publish", "/jobs/"),
    "complete-database": ("publish", "/quarry[.]db"),
}
FAULTS = ("kill", "EIO", "ENOSPC")
LIVES = 6
"""Lives that a job may need after a fault; one is enough but where the fault comes back from the store."""


class House:
    """An undisturbed run, and the folders of disturbed ones, which begin as it did."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, make_target(folder)
        self._made = 0
        self._first = service(folder / "first", self.target)
        submit(self._first, self.target)
        undisturbed = self.begun()
        self.trace = self.watch(undisturbed)
        dataset = undisturbed.dataset_dir(JOB)
        assert_right(dataset, self.target)
        self.tree = tree(dataset)

    def begun(self) -> Settings:
        """Return a service in a new folder, its job submitted."""
        self._made += 1
        folder = self.folder / f"run{self._made}"
        shutil.copytree(self._first.data_dir, folder / "data")
        return service(folder / "data", self.target)

    def watch(self, settings: Settings) -> Path:
        life = Life.begin(settings, JOB, Fault("all", f"^{settings.data_dir}/"), data=True)
        assert life.end() == COMPLETED
        return life.trace

    def begin(self, stage: str, kind: str = "watch", n: int = 0) -> tuple[Settings, Life]:
        """Begin a life that meets a fault at the n-th call of a stage."""
        settings = self.begun()
        role, pattern = STAGES[stage]
        return settings, Life.begin(settings, JOB, Fault(role, f"^{settings.data_dir}.*{pattern}", kind, n))

    def count(self, stage: str, kind: str) -> int:
        """Return how many calls of a stage may meet a kind of fault."""
        settings, life = self.begin(stage)
        assert life.end() == COMPLETED
        counted = sum(call.operation in MEETS[kind] for call in calls(life.trace))
        assert counted
        shutil.rmtree(settings.data_dir.parent)
        return counted

    def assert_finishes(self, settings: Settings, status: int | None = None) -> None:
        """Start the service until its job is complete; `status` is how its last life ended."""
        lives = 0
        while status != COMPLETED:
            log = settings.data_dir.with_suffix(".log")
            assert status != FAILED and lives < LIVES, log.read_text() if log.exists() else status
            status = Life.begin(settings, JOB).end()
            lives += 1
        assert tree(settings.dataset_dir(JOB)) == self.tree


def locked(settings: Settings) -> bool:
    """Say whether a stopped process holds SQLite's one lock; on PostgreSQL it would lose it in a while."""
    with closing(sqlite3.connect(settings.data_dir / "quarry.db", timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    open_server(build_shim(tmp_path_factory.mktemp("shim")))
    with tempfile.TemporaryDirectory(prefix="quarry-crash-") as folder:
        yield House(Path(folder))


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_the_nth_call_loses_and_doubles_nothing(
    house: House, tally: Counter[str], stage: str, kind: str
) -> None:
    for n in chosen(f"{stage} {kind}", range(1, house.count(stage, kind) + 1), sample=4):
        settings, life = house.begin(stage, kind, n)
        status, hit = life.end(), life.hit()
        print(f"{stage} {kind} {n} at {hit and (hit.operation, hit.path, hit.other)}: {status}")
        house.assert_finishes(settings, status)
        tally[kind] += hit is not None
        shutil.rmtree(settings.data_dir.parent)


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("stage", ["plan", "seal", "index", "landing", "complete"])
def test_a_life_that_stood_still_past_its_lease_changes_nothing(
    house: House, tally: Counter[str], stage: str
) -> None:
    """1. SIGSTOP at the n-th call. 2. Another life takes over and completes the job. 3. SIGCONT."""
    for n in chosen(f"{stage} stop", range(1, house.count(stage, "stop") + 1), sample=2):
        settings, life = house.begin(stage, "stop", n)
        while life.process.is_alive() and not life.stopped():
            time.sleep(LOOK_S)
        print(f"{stage} stop {n} at {life.hit()}")
        if life.process.is_alive() and not locked(settings):
            house.assert_finishes(settings)
            os.kill(life.process.pid, signal.SIGCONT)
            assert life.end() == COMPLETED, settings.data_dir.with_suffix(".log").read_text()
            # A publisher that comes back may write its file once more, with the same bytes.
            assert tree(settings.dataset_dir(JOB)) == house.tree
            tally["stop"] += 1
        elif life.process.is_alive():
            os.kill(life.process.pid, signal.SIGCONT)
            house.assert_finishes(settings, life.end())
        shutil.rmtree(settings.data_dir.parent)
