"""The sweeper beside others: another database's jobs, other sweepers, and a database that is away."""

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import service.worker
from schemas.job import JobState
from service.errors import DiskFull, QuarryError, StoreUnavailable
from service.settings import Settings
from service.store import Store, migration
from service.sweeper import sweep
from service.worker import run_worker
from tests.support.jobs import Shop, conversations, request


def test_the_work_of_a_job_that_the_database_does_not_know_is_left_alone(
    shop: Shop, tmp_path: Path, target: Path
) -> None:
    """1. A job is planned. 2. A worker sweeps with another database. 3. The job still completes."""
    job_id = shop.submit(request(target, conversations(10)))
    shop.plan()
    other = Store(f"sqlite:///{tmp_path / 'other.db'}")
    other.write(migration.migrate)
    assert sweep(other, shop.settings) == []
    other.close()
    assert shop.finish(job_id).state is JobState.COMPLETED


@pytest.mark.parametrize("error", [FileNotFoundError(2, "gone"), PermissionError(13, "not yours")], ids=str)
def test_what_cannot_be_removed_is_left_to_the_next_sweep(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    job_id = shop.submit(request(target, conversations(10)))
    attempts = shop.settings.work_root / job_id / "attempts"
    lost = [attempts / "00000-7", attempts / "00000-8"]
    for folder in lost:
        folder.mkdir(parents=True)
    remove = shutil.rmtree

    def removing(path: Path) -> None:
        if path == lost[0]:
            raise error
        remove(path)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", removing)
        assert sweep(shop.store, shop.settings) == [lost[1]]
    assert sweep(shop.store, shop.settings) == [lost[0]]


@pytest.mark.parametrize("stale", ["", "{job}/attempts"], ids=["the root", "a job's attempts"])
def test_a_stale_folder_is_passed_over_and_swept_later(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, stale: str
) -> None:
    """1. Two jobs have a lost attempt each. 2. A folder is a stale NFS handle. 3. It is well again."""
    jobs = [shop.submit(request(target, conversations(1)), key) for key in ("a", "b")]
    lost = [shop.settings.work_root / job / "attempts" / "00000-7" for job in sorted(jobs)]
    for folder in lost:
        folder.mkdir(parents=True)
    unreadable = shop.settings.work_root / stale.format(job=min(jobs))
    with monkeypatch.context() as patched:
        for name in ("listdir", "scandir"):
            patched.setattr(os, name, partial(refusing, getattr(os, name), unreadable))
        assert sweep(shop.store, shop.settings) == (lost[1:] if stale else [])
    assert sweep(shop.store, shop.settings) == (lost[:1] if stale else lost)


def refusing(read: Callable[[Any], Any], stale: Path, path: Any) -> Any:
    if path == stale:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
    return read(path)


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), DiskFull("it cannot grow")], ids=["away", "full"]
)
@pytest.mark.parametrize("well", [0, 1], ids=["the first", "a later one"])
def test_a_worker_outlives_a_sweep_without_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: QuarryError, well: int
) -> None:
    """1. A sweep finds no database, at the start or later. 2. The next is well. 3. A bug ends the worker."""
    errors = iter([None] * well + [error, None, ZeroDivisionError("a bug")])

    def sweeping(store: Store, settings: Settings) -> list[Path]:
        error = next(errors)
        if error is not None:
            raise error
        return []

    monkeypatch.setattr(service.worker, "sweep", sweeping)
    monkeypatch.setattr(service.worker, "RESTART_S", 0.05)
    monkeypatch.setattr(service.worker, "SWEEP_S", 0.0)
    with pytest.raises(ZeroDivisionError):
        run_worker(Settings(data_dir=tmp_path, poll_s=0.05))
