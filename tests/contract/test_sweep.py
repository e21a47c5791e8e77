"""The sweeper beside others: another database's jobs, a disk that refuses, and a database that is away."""

import shutil
from pathlib import Path

import pytest

import service.worker
from schemas.job import JobState
from service.errors import DiskFull, QuarryError, StoreUnavailable
from service.settings import Settings
from service.store import Lease, Store, jobs, migration, tasks
from service.worker import run_worker
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import sweep


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


def test_what_cannot_be_removed_is_tried_again(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An attempt's folder is gone, another cannot be removed. 2. It can. 3. The job is swept again."""
    job_id = shop.submit(request(target, conversations(10)))
    lost = [shop.settings.work_root / job_id / "attempts" / f"00000-{epoch}" for epoch in (7, 8)]
    for folder in lost:
        folder.mkdir(parents=True)
    shop.store.write(jobs.pause, job_id)
    remove = shutil.rmtree

    def removing(path: Path) -> None:
        if path == lost[1]:
            raise PermissionError(13, "not yours", str(path))
        remove(path)
        raise FileNotFoundError(2, "gone", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", removing)
        assert sweep(shop.store, shop.settings) == [lost[0]]
    assert sweep(shop.store, shop.settings) == []  # not at once
    shop.store.write(jobs.cancel, job_id)
    assert sweep(shop.store, shop.settings) == [lost[1]]


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), DiskFull("it cannot grow")], ids=["away", "full"]
)
@pytest.mark.parametrize("well", [0, 1], ids=["the first", "a later one"])
def test_a_worker_outlives_a_sweep_without_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: QuarryError, well: int
) -> None:
    """1. A sweep finds no database, at the start or later. 2. The next is well. 3. A bug ends the worker."""
    errors = iter([None] * well + [error, None, ZeroDivisionError("a bug")])

    def leasing(store: Store, owner: str, ttl_s: float) -> Lease | None:
        error = next(errors)
        if error is not None:
            raise error
        return None

    monkeypatch.setattr(tasks, "lease_sweep", leasing)
    monkeypatch.setattr(service.worker, "RESTART_S", 0.05)
    monkeypatch.setattr(service.worker, "SWEEP_S", 0.0)
    with pytest.raises(ZeroDivisionError):
        run_worker(Settings(data_dir=tmp_path, poll_s=0.05))
