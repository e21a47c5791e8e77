"""The sweeper beside others: another database's jobs, a disk that refuses, and a database that is away."""

import shutil
import signal
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import service.worker
from schemas.job import JobState
from service.capture import loop
from service.control.deletion import delete_job
from service.errors import DiskFull, StoreUnavailable
from service.settings import Settings
from service.store import Store, Transaction, commits, deletion, jobs, migration, schedules
from service.work.runner import one_of_many
from service.worker import run_worker
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import sweep
from tests.support.store_cases import job_id


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


def test_a_folder_that_cannot_be_removed_hinders_no_other_and_is_tried_again(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An attempt cannot be removed, another is gone meanwhile. 2. The rest is swept, and the job says why,
    once. 3. It can be."""
    lost, job_ids = [], []
    for key in ("one", "another"):
        job_id = shop.submit(request(target, conversations(10)), key)
        attempts = shop.settings.work_root / job_id / "attempts"
        lost += [attempts / f"00000-{epoch}" for epoch in (6, 7, 8)]
        shop.store.write(jobs.pause, job_id)
        job_ids.append(job_id)
    for folder in lost:
        folder.mkdir(parents=True)
    remove = shutil.rmtree

    def removing(path: Path) -> None:
        if path == lost[0]:
            raise PermissionError(13, "not yours", str(path))
        if path == lost[1]:
            raise ZeroDivisionError("a bug")
        remove(path)
        raise FileNotFoundError(2, "gone", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", removing)
        assert sweep(shop.store, shop.settings) == sorted(lost[2:])
        assert sweep(shop.store, shop.settings) == []
    said = [
        [event.message for event in shop.store.read(jobs.events, job_id) if event.problem is not None]
        for job_id in job_ids
    ]
    assert said == [
        [f"{lost[0]} cannot be removed: not yours", "internal error: ZeroDivisionError('a bug')"],
        [],
    ]
    assert sweep(shop.store, shop.settings) == lost[:2]


def test_a_job_that_is_deleted_while_it_is_swept_ends_nothing(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Two completed jobs wait to be swept. 2. The first is deleted after its state was read."""
    first, second = sorted(shop.run(request(target, conversations(5)), key).id for key in ("one", "another"))
    read = jobs.state

    def state(tx: Transaction, job_id: str) -> JobState:
        seen = read(tx, job_id)
        if job_id == first:
            delete_job(shop.store, shop.settings, first, with_dataset=False)
        return seen

    monkeypatch.setattr(jobs, "state", state)
    assert sweep(shop.store, shop.settings) == [shop.settings.work_root / name for name in (first, second)]


@pytest.mark.parametrize(
    "error",
    [StoreUnavailable("away"), DiskFull("it cannot grow"), ZeroDivisionError("a bug")],
    ids=["away", "full", "a bug"],
)
@pytest.mark.parametrize("verb", [(schedules, "due"), (deletion, "old"), (jobs, "state")], ids=lambda v: v[1])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_outlives_whatever_happens_to_its_slots_its_retention_and_its_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, verb: tuple[ModuleType, str]
) -> None:
    """1. The verb fails twice. 2. The next time it is well, and the worker ends as it is asked to."""
    settings = Settings(data_dir=tmp_path, poll_s=0.05, keep_jobs_days=1.0)
    (settings.work_root / job_id(1)).mkdir(parents=True)
    errors, (module, name) = iter([error, error]), verb
    healthy = getattr(module, name)

    def failing(*args: object) -> object:
        if (planted := next(errors, None)) is not None:
            raise planted
        signal.raise_signal(signal.SIGTERM)
        return healthy(*args)

    monkeypatch.setattr(module, name, failing)
    for constant in ("RESTART_S", "SWEEP_S", "SLOTS_S"):
        monkeypatch.setattr(service.worker, constant, 0.05)
    assert run_worker(settings) == 0


@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), DiskFull("it cannot grow")], ids=["away", "full"]
)
def test_what_ends_the_work_for_all_jobs_is_no_event_of_one(
    shop: Shop, target: Path, error: Exception
) -> None:
    job_id = shop.submit(request(target, conversations(2)))
    with pytest.raises(type(error)), one_of_many("sweeping", shop.store, job_id):
        raise error
    assert all(event.problem is None for event in shop.store.read(jobs.events, job_id))


def shards_of(shop: Shop, job_id: str) -> list[bool]:
    """Say of each committed shard whether it is in the dataset's folder."""
    folder = shop.settings.dataset_dir(job_id)
    return [(folder / entry.path).is_file() for entry in shop.store.read(commits.shards, job_id)]


def test_files_of_a_unit_whose_keeper_hears_first_that_it_is_done_are_landed(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A commit is made. 2. Before its thread is heard of, the lease is to be extended: it is gone."""
    shop = Shop.open(tmp_path, target, lease_s=1.0)
    job_id = shop.submit(request(target, conversations(10)))
    shop.plan()
    write, lost, heard = Store.write, loop.Capture._lost, threading.Event()

    def hear(capture: loop.Capture, unit: Any) -> None:
        lost(capture, unit)
        heard.set()

    def slow(store: Store, verb: Any, *args: Any, **kwargs: Any) -> Any:
        answer = write(store, verb, *args, **kwargs)
        if verb is commits.commit:
            assert heard.wait(60)
        return answer

    monkeypatch.setattr(loop.Capture, "_lost", hear)
    monkeypatch.setattr(Store, "write", slow)
    shop.capture(job_id)
    assert set(shards_of(shop, job_id)) == {True}
    shop.store.close()
