"""A job's undisturbed run, and others of it that begin alike and are disturbed."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.settings import Settings
from tests.crash.faults import CHANGING, COMPLETED, FAILED, MEETS, Fault, Life, calls
from tests.crash.oracle import JOB, assert_right, make_target, service, submit, tree

STAGES = {
    "plan": ("plan", "work/.+"),
    "plan-database": ("plan", "/quarry[.]db"),
    "seal": ("capture", "/attempts(/[^/]+(/[.]?train[^/]+)?)?$"),
    "index": ("capture", "/[.]?index[.]parquet"),
    "commit": ("capture", "/quarry[.]db"),
    "move": ("capture", "/jobs"),
    "complete": ("publish", "/jobs/"),
    "complete-database": ("publish", "/quarry[.]db"),
    "push": ("publish", "^socket:|/jobs/"),
    "store": ("store", "^socket:|/scratch/"),
    "store-database": ("store", "/quarry[.]db"),
}
OF_HUB = ("push", "store", "store-database")
"""Stages of a job that is pushed."""
LIVES = 6
"""Lives that a job may need after a fault; one is enough but where the fault comes back from the store."""


class House:
    """An undisturbed run, its calls, and the folders of disturbed ones, which begin as it did.

    Of one that is `away` the shards are in the repository alone.
    """

    def __init__(
        self, folder: Path, job: Mapping[str, Any] = {}, *, away: bool = False, **changes: Any
    ) -> None:
        self.folder, self.target, self._changes = folder, make_target(folder), changes
        self._made, self._is_away = 0, away
        self.first = service(folder / "first", self.target)
        submit(self.first, self.target, **job)
        self.undisturbed = self.begun()
        root = self.undisturbed.data_dir
        life = Life.begin(self.undisturbed, JOB, Fault("all", f"^{root}(/|$)"), data=True, away=away)
        assert life.end() == COMPLETED
        self.trace = [call for call in calls(life.trace) if call.operation in CHANGING]
        if not away:
            assert_right(self.undisturbed.dataset_dir(JOB), self.target)
        self.tree = tree(self.undisturbed.dataset_dir(JOB))

    def begun(self) -> Settings:
        """Return a service in a new folder, its job submitted."""
        self._made += 1
        folder = self.folder / f"run{self._made}"
        shutil.copytree(self.first.data_dir, folder / "data")
        return service(folder / "data", self.target, **self._changes)

    def begin(self, stage: str, kind: str = "watch", n: int = 0) -> tuple[Settings, Life]:
        """Begin a life that meets a fault at the n-th call of a stage."""
        settings = self.begun()
        role, pattern = STAGES[stage]
        pattern = pattern if pattern.startswith("^") else f"^{settings.data_dir}.*{pattern}"
        return settings, Life.begin(settings, JOB, Fault(role, pattern, kind, n), away=self._is_away)

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
            status = Life.begin(settings, JOB, away=self._is_away).end()
            lives += 1
        files = tree(settings.dataset_dir(JOB))
        differing = {path for path in files.keys() | self.tree if files.get(path) != self.tree.get(path)}
        assert not differing, differing
