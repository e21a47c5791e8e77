"""Jobs are deleted after their end, by request and by age; a deletion that was cut off is ended later."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, update

import service.control.deletion
from schemas.job import ENDED_JOB_STATES, JobState
from schemas.keys import NewKey, Scope
from service import sweeper
from service.control.deletion import delete_job
from service.errors import EngineRefused, IllegalMove, NotFound, WriteFailed
from service.settings import Settings
from service.store import Store, Transaction, commits, deletion, jobs, keys, publishing, schedules, workers
from service.store.tables import JOB, METADATA, TASK
from service.store.transitions import lock_job
from service.work.keeper import Keeper
from service.work.runner import LoopContext
from tests.contract.store.test_captured_samples import begin, commit
from tests.contract.store.test_schedules import schedule
from tests.support.roles import delete_old, sweep
from tests.support.store_cases import (
    OWNER,
    TTL_S,
    Clock,
    capture,
    job_id,
    lease_publish,
    lease_unit,
    reach,
    start_units,
    stop_job,
)

DAY_S = 86_400.0


def settings_in(tmp_path: Path, **changes: object) -> Settings:
    return Settings.model_validate({"data_dir": tmp_path / "data", **changes})


def folders(settings: Settings, name: str) -> tuple[Path, Path]:
    """Make the folders of a job, each with a file."""
    made = settings.work_root / name, settings.dataset_dir(name)
    for folder in made:
        folder.mkdir(parents=True)
        (folder / "file").touch()
    return made


def rows_left(store: Store) -> dict[str, int]:
    with store.reading() as tx:
        counts = {
            table.name: tx.connection.scalar(select(func.count()).select_from(table))
            for table in METADATA.sorted_tables
            # A tombstone stays, so that the job's key names no other job; and what the totals count.
            if table.name not in {"canary", "past", "submission"}
        }
    return {name: count for name, count in counts.items() if count}


def rows_of_others(store: Store, job: str) -> dict[str, list[str]]:
    with store.reading() as tx:
        rows = {table.name: tx.connection.execute(select(table)).all() for table in METADATA.sorted_tables}
    del rows["past"]
    return {name: sorted(str(row) for row in some if job not in row) for name, some in rows.items()}


def test_a_deletion_changes_no_row_of_another_job(store: Store, clock: Clock, tmp_path: Path) -> None:
    """Not even of a run of the same schedule, whose samples would be captured again."""
    store.write(schedules.add, schedule())
    runs = []
    for _ in range(2):
        runs.append(begin(store, clock, 2))
        commit(store, lease_unit(store, job=runs[-1]))
        stop_job(store, runs[-1], JobState.FAILED)
    store.write(jobs.cancel, runs[0])  # the second run publishes it
    others = rows_of_others(store, runs[0])
    assert others["captured_samples"] and others["unit_commit"] and others["task"]
    delete_job(store, settings_in(tmp_path), runs[0], with_dataset=True)
    assert rows_of_others(store, runs[0]) == others


@pytest.mark.parametrize("state", JobState)
def test_only_what_has_ended_is_deleted_and_then_no_row_of_it_is_left(
    store: Store, tmp_path: Path, state: JobState
) -> None:
    reach(store, state)
    settings = settings_in(tmp_path)
    if state in ENDED_JOB_STATES:
        delete_job(store, settings, job_id(1), with_dataset=False)
        assert rows_left(store) == {}
    else:
        before = rows_left(store)
        with pytest.raises(IllegalMove, match="cannot become deleting"):
            delete_job(store, settings, job_id(1), with_dataset=True)
        assert rows_left(store) == before


def test_no_worker_rests_from_a_job_that_is_deleted(store: Store, tmp_path: Path) -> None:
    start_units(store)
    store.write(workers.beat, "another", TTL_S)
    store.write(workers.pass_on, lease_unit(store), EngineRefused("why"), DAY_S)
    store.write(jobs.cancel, job_id(1))
    delete_job(store, settings_in(tmp_path), job_id(1), with_dataset=False)
    assert not store.read(workers.sick, resting=True)
    assert not store.write(workers.leave, OWNER)


def test_a_deletion_that_was_cut_off_cannot_be_resumed_and_its_task_ends_it(
    store: Store, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The disk refuses. 2. The job is neither resumed nor lost, and says why. 3. The task deletes it."""
    reach(store, JobState.FAILED)
    settings = settings_in(tmp_path)
    work, dataset = folders(settings, job_id(1))

    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    with monkeypatch.context() as broken, pytest.raises(WriteFailed, match="Permission denied"):
        broken.setattr(shutil, "rmtree", refused)
        delete_job(store, settings, job_id(1), with_dataset=True)
    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", refused)
        delete_old(store, settings)
    assert work.exists() and not dataset.exists()
    problem = store.read(jobs.job, job_id(1)).problem
    assert problem is not None and "Permission denied" in problem.detail
    with pytest.raises(IllegalMove):
        store.write(jobs.resume, job_id(1))
    delete_old(store, settings)
    assert work.exists(), "it waits before it tries again"
    clock.advance(settings.lease_s)
    delete_old(store, settings)
    assert not work.exists() and list(dataset.parent.iterdir()) == []
    with pytest.raises(NotFound):
        store.read(jobs.job, job_id(1))


def test_a_dataset_that_was_to_be_kept_is_kept_where_its_deletion_is_ended_later(
    store: Store, tmp_path: Path
) -> None:
    """Datasets that are old are deleted here, but this one's job was to be deleted without it."""
    reach(store, JobState.DELETING)
    settings = settings_in(tmp_path, keep_jobs_days=0, delete_old_datasets=True)
    work, dataset = folders(settings, job_id(1))
    delete_old(store, settings)
    assert (work.exists(), dataset.exists()) == (False, True)


def test_a_dataset_that_was_to_go_goes_where_nothing_but_the_wish_was_recorded(
    store: Store, tmp_path: Path
) -> None:
    reach(store, JobState.COMPLETED)
    settings = settings_in(tmp_path)
    work, dataset = folders(settings, job_id(1))
    store.write(deletion.begin, job_id(1), with_dataset=True)
    store.write(deletion.begin, job_id(1), with_dataset=False)
    delete_old(store, settings)
    assert (work.exists(), dataset.exists()) == (False, False)
    assert rows_left(store) == {}


def test_a_dataset_goes_though_another_deletion_that_keeps_it_is_under_way(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A caller deletes the job alone. 2. Another wants the dataset gone, and dies before it is."""
    reach(store, JobState.DELETING)
    settings = settings_in(tmp_path)
    _, dataset = folders(settings, job_id(1))
    give_back = service.control.deletion.give_back

    def meanwhile(*args: Any) -> None:
        give_back(*args)
        store.write(deletion.begin, job_id(1), with_dataset=True)

    monkeypatch.setattr(service.control.deletion, "give_back", meanwhile)
    monkeypatch.setattr(service.control.deletion, "PAUSE_S", 0.0)
    delete_job(store, settings, job_id(1), with_dataset=False)
    assert store.read(jobs.state, job_id(1)) is JobState.DELETING
    delete_old(store, settings)
    assert not dataset.exists()
    assert rows_left(store) == {}


def test_a_folder_that_cannot_be_removed_delays_no_other_jobs_deletion(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        reach(store, JobState.FAILED, number)
    settings = settings_in(tmp_path, keep_jobs_days=0)
    stuck = folders(settings, job_id(1))[0]
    remove = shutil.rmtree

    def removing(folder: Path) -> None:
        if folder == stuck:
            raise PermissionError(13, "Permission denied", str(folder))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", removing)
    delete_old(store, settings)
    (left,) = store.read(jobs.page)[0]
    assert (left.id, left.state) == (job_id(1), JobState.DELETING)


def test_a_large_job_is_deleted_in_steps_and_by_its_task_where_the_caller_does_not_wait(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "MAX_ROWS", 3)
    monkeypatch.setattr(service.control.deletion, "PAUSE_S", 0.0)
    capture(store, units=5)
    store.write(publishing.complete, lease_publish(store), None)
    settings = settings_in(tmp_path)
    delete_job(store, settings, job_id(1), with_dataset=True)
    assert store.read(jobs.state, job_id(1)) is JobState.DELETING
    delete_old(store, settings)
    assert rows_left(store) == {}


def test_the_token_counts_of_a_complete_job_go_in_steps_and_those_of_others_stay(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A worker that is stopped sweeps, and ends after one step. 2. The next one goes on."""
    monkeypatch.setattr(deletion, "MAX_BLOBS", 2)
    monkeypatch.setattr(sweeper, "PAUSE_S", 0.0)
    capture(store, units=5)
    store.write(publishing.complete, lease_publish(store), None)
    capture(store, units=3, number=2)
    settings = settings_in(tmp_path)
    work = [folders(settings, job_id(number))[0] for number in (1, 2)]
    stops = iter([False, False, False, True])
    keeper = Keeper(store, settings.lease_s)
    sweeper.run_sweep(LoopContext(store, settings, "first", keeper, lambda: next(stops)))
    assert rows_left(store)["token_counts"] == 3 + 3 and [folder.exists() for folder in work] == [False, True]
    sweep(store, settings)
    assert rows_left(store)["token_counts"] == 3 and [folder.exists() for folder in work] == [False, True]
    assert len(store.read(commits.unit_commits, job_id(1))) == 5


@pytest.mark.parametrize("with_datasets", [False, True])
def test_jobs_are_deleted_when_their_days_are_over(
    store: Store, clock: Clock, tmp_path: Path, with_datasets: bool
) -> None:
    """1. Of three jobs, one runs on, one ended three days ago, one an hour ago. 2. Two days are kept."""
    reach(store, JobState.RUNNING, 1)
    reach(store, JobState.FAILED, 2)
    clock.advance(3 * DAY_S)
    reach(store, JobState.CANCELLED, 3)
    clock.advance(3600)
    delete_old(store, settings_in(tmp_path))
    assert len(store.read(jobs.page)[0]) == 3
    settings = settings_in(tmp_path, keep_jobs_days=2, delete_old_datasets=with_datasets)
    work, dataset = folders(settings, job_id(2))
    delete_old(store, settings)
    assert (work.exists(), dataset.exists()) == (False, not with_datasets)
    assert {row.id for row in store.read(jobs.page)[0]} == {job_id(1), job_id(3)}


@pytest.mark.parametrize("with_datasets", [False, True])
@pytest.mark.parametrize(("max_bytes", "is_revoked"), [(None, False), (10**9, False), (10**9, True)])
def test_a_job_stays_while_its_dataset_counts_for_its_owner(
    store: Store, tmp_path: Path, max_bytes: int | None, is_revoked: bool, with_datasets: bool
) -> None:
    """1. Its days are over. 2. It is kept with its dataset, or both go; or its owner is not limited."""
    new = NewKey(name="tenant", scopes=(Scope.JOBS_WRITE,), max_bytes=max_bytes)
    store.write(keys.add, "ab" * 4, "0" * 64, new)
    if is_revoked:
        store.write(keys.revoke, "ab" * 4)
    capture(store)
    store.write(publishing.complete, lease_publish(store), None)
    store.write(lambda tx: tx.connection.execute(update(JOB).values(owner="tenant")))
    settings = settings_in(tmp_path, keep_jobs_days=0, delete_old_datasets=with_datasets)
    dataset = folders(settings, job_id(1))[1]
    delete_old(store, settings)
    is_kept = max_bytes is not None and not with_datasets
    assert (len(store.read(jobs.page)[0]), dataset.exists()) == (int(is_kept), not with_datasets)
    shutil.rmtree(dataset, ignore_errors=True)
    delete_old(store, settings)
    assert store.read(jobs.page)[0] == [], "what nothing is left of counts for nobody"


def test_a_job_that_is_resumed_meanwhile_is_not_deleted_for_its_age(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(store, JobState.FAILED)
    settings = settings_in(tmp_path, keep_jobs_days=0)

    begin = deletion.begin

    def after_a_resume(tx: Transaction, job_id: str, *, with_dataset: bool) -> None:
        jobs.resume(tx, job_id)
        tx.connection.commit()
        begin(tx, job_id, with_dataset=with_dataset)

    monkeypatch.setattr(deletion, "begin", after_a_resume)
    delete_old(store, settings)
    assert store.read(jobs.state, job_id(1)) is JobState.QUEUED


def test_a_priority_of_a_job_that_has_ended_neither_changes_it_nor_renews_its_days(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    reach(store, JobState.COMPLETED)
    before, events = store.read(jobs.job, job_id(1)), store.read(jobs.events, job_id(1))
    clock.advance(3 * DAY_S)
    assert store.write(jobs.set_priority, job_id(1), 5) == before
    assert store.read(jobs.events, job_id(1)) == events
    delete_old(store, settings_in(tmp_path, keep_jobs_days=2))
    assert store.read(jobs.page)[0] == []


def test_who_takes_the_task_of_a_deletion_and_who_ends_it_do_not_wait_for_each_other(store: Store) -> None:
    """1. A worker has locked the job. 2. Its records are deleted beside that. 3. It leases the task."""
    reach(store, JobState.COMPLETED)
    store.write(deletion.begin, job_id(1), with_dataset=False)
    with ThreadPoolExecutor(1) as beside:
        with store.writing() as tx:
            lock_job(tx, job_id(1))
            ending = beside.submit(store.write, deletion.forget, job_id(1))
            if tx.connection.dialect.name == "postgresql":
                waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
                while not tx.connection.exec_driver_sql(waiting).scalar():
                    assert not ending.done()
            tx.connection.execute(update(TASK).where(TASK.c.job_id == job_id(1)).values(attempts=1))
        assert ending.result() is False
    assert rows_left(store) == {}
