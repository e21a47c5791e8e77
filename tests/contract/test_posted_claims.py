"""A posted sample is one job's at a time, whoever dies, stops, deletes or takes a name over meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.dataset.seal import make_folder
from schemas.job import JobState
from schemas.names import posted_path
from service.control import scheduling
from service.control.deletion import delete_job
from service.errors import LeaseLost
from service.plan import planner
from service.plan.planner import plan_job
from service.plan.posted import take
from service.store import jobs, plans
from tests.support.nights import NAME, Faults, Nights, names, plan_some
from tests.support.roles import sweep


@pytest.fixture
def nights(tmp_path: Path, target: Path, url: str) -> Iterator[Nights]:
    opened = Nights.open(tmp_path, target, url, request={"source": {"kind": "posted"}})
    yield opened
    opened.store.close()


def swept(nights: Nights) -> None:
    sweep(nights.store, nights.shop.settings)


def delete(nights: Nights, job_id: str) -> None:
    delete_job(nights.store, nights.shop.settings, job_id, with_dataset=True)


def rows(nights: Nights, job_id: str) -> list[str]:
    return sorted(row["source_id"] for row in nights.shop.rows(job_id))


def test_a_schedule_added_again_keeps_its_posts_from_a_job_of_the_one_before(nights: Nights) -> None:
    """1. A job is planned. 2. Its schedule is deleted and added again. 3. The same samples are posted.

    4. The job completes and is swept. 5. A night of the new schedule."""
    nights.post(0, 1)
    nights.submit()
    nights.shop.plan()
    first = nights.job().id
    scheduling.remove(nights.store, nights.shop.settings, NAME)
    nights.add()
    nights.post(0, 1)
    nights.work()
    swept(nights)
    nights.night()
    assert nights.job().id != first
    assert [rows(nights, job.id) for job in nights.jobs()] == [["s0", "s1"], ["s0", "s1"]]


def test_another_database_on_the_data_folder_neither_takes_nor_removes_what_was_posted(
    nights: Nights, tmp_path: Path, target: Path
) -> None:
    nights.post(0, 1)
    url = f"sqlite:///{tmp_path / 'later.db'}"
    later = Nights.open(tmp_path, target, url, request={"source": {"kind": "posted"}})
    scheduling.remove(later.store, later.shop.settings, NAME)
    later.add()
    later.post(2)
    later.night()
    swept(later)
    assert later.once() == ["s2"]
    later.store.close()
    nights.night()
    assert nights.once() == names(range(2))


def test_all_samples_are_those_that_were_posted_since_and_not_what_is_not_swept_yet(nights: Nights) -> None:
    nights.change(samples="all")
    nights.post(0, 1)
    nights.night()
    nights.post(2)
    nights.night()
    assert nights.once() == names(range(3))


def test_a_night_that_waited_for_another_has_its_own_files_when_that_is_swept(nights: Nights) -> None:
    """1. A night waits for one that is planned. 2. That completes; the other's planner dies after a unit.

    3. The first is swept. 4. The other is planned again."""
    nights.post(*range(4))
    nights.submit()
    nights.shop.plan()
    nights.post(*range(10, 16))
    nights.submit()
    first = nights.job().id
    nights.shop.capture(first)
    nights.shop.publish()
    scheduling.submit_due(nights.store, nights.shop.settings)
    assert nights.job().id != first
    plan_some(nights, 1)
    swept(nights)
    nights.clock.advance(nights.shop.settings.lease_s + 1)
    nights.work()
    assert nights.job().state is JobState.COMPLETED, nights.job().problem
    assert nights.once() == names(range(4), range(10, 16))


@pytest.mark.parametrize("samples", ["new", "all"])
def test_samples_without_ids_that_are_posted_again_are_written_once(nights: Nights, samples: str) -> None:
    nights.change(samples=samples)
    nights.post(0, 1, ids=False)
    nights.post(1, 2, ids=False)
    nights.night()
    job = nights.job()
    assert (job.progress.samples_written, job.progress.samples_rejected) == (3, 1)
    assert len(set(rows(nights, job.id))) == 3


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_paused_job_takes_nothing_of_who_has_its_schedules_name_now(nights: Nights, is_begun: bool) -> None:
    """1. A pauses a job and deletes its schedule. 2. B makes one of the name, and posts. 3. A resumes."""
    nights.post(*range(6))
    nights.submit()
    mine = nights.job().id
    if is_begun:
        plan_some(nights, 1)
    nights.store.write(jobs.pause, mine)
    scheduling.remove(nights.store, nights.shop.settings, NAME)
    nights.add("b")
    nights.post(*range(50, 53))
    nights.store.write(jobs.resume, mine)
    nights.clock.advance(nights.shop.settings.lease_s + 1)
    nights.work()
    swept(nights)
    job = nights.store.read(jobs.job, mine)
    if is_begun:
        assert job.state is JobState.COMPLETED, job.problem
        assert rows(nights, mine) == names(range(6))
    else:
        assert job.state is JobState.FAILED and job.problem is not None
        assert "schedule was deleted" in job.problem.detail
    assert len(nights.waiting()) == 1


class PlannerKilled(Exception):
    """It met SIGKILL."""


def test_a_planner_that_dies_between_two_files_is_gone_on_from(nights: Nights) -> None:
    for number in range(4):
        nights.post(number)
    nights.submit()
    job, left = nights.job().id, iter(range(2))
    make_folder(nights.shop.settings.work_root / posted_path(job))

    def dies() -> None:
        if next(left, None) is None:
            raise PlannerKilled

    with pytest.raises(PlannerKilled):
        take(nights.shop.settings, nights.number(), job, {}, dies)
    assert len(nights.waiting()) == 2
    nights.post(9)
    nights.work()
    assert nights.waiting() == []
    assert nights.once() == names(range(4), range(9, 10))


def test_what_a_planner_takes_after_it_lost_its_lease_comes_in_the_next_night(nights: Nights) -> None:
    """1. A job is planned. 2. More is posted. 3. A planner wakes that had begun before. 4. A night."""
    nights.post(0, 1)
    nights.submit()
    nights.shop.plan()
    nights.post(2)
    take(nights.shop.settings, nights.number(), nights.job().id, {}, lambda: None)
    assert nights.waiting() == []
    nights.work()
    swept(nights)
    assert len(nights.waiting()) == 1
    nights.night()
    assert nights.once() == names(range(3))


def test_a_planner_that_lost_its_lease_does_not_say_what_the_plan_holds(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A planner pauses before it takes. 2. Another plans the job. 3. More is posted. 4. It goes on."""
    nights.post(0, 1)
    nights.submit()
    lease = plans.lease(nights.store, "first", 60.0)
    assert lease is not None

    def pauses(*arguments: Any) -> None:
        monkeypatch.undo()
        nights.clock.advance(61)
        nights.shop.plan()
        nights.post(2)
        take(*arguments)

    monkeypatch.setattr(planner, "take", pauses)
    with pytest.raises(LeaseLost):
        plan_job(lease, nights.store, nights.shop.settings, lambda: None)
    nights.work()
    swept(nights)
    nights.night()
    assert nights.once() == names(range(3))


def test_a_planner_takes_nothing_for_a_job_that_was_deleted_while_it_read_the_model(nights: Nights) -> None:
    """1. A planner has its lease and reads the weights. 2. The job is cancelled and deleted. 3. A night."""
    nights.post(0, 1)
    nights.submit()
    job = nights.job().id
    lease = plans.lease(nights.store, "planner", 60.0)
    assert lease is not None

    def deleted() -> None:
        if nights.jobs():
            nights.store.write(jobs.cancel, job)
            delete(nights, job)

    with pytest.raises(LeaseLost):
        plan_job(lease, nights.store, nights.shop.settings, deleted)
    assert not (nights.shop.settings.work_root / job).exists()
    assert len(nights.waiting()) == 1
    nights.night()
    assert nights.once() == names(range(2))


@pytest.mark.parametrize("is_published_first", [False, True])
@pytest.mark.parametrize("overlap", ["queue", "replace"])
def test_the_rest_of_a_job_that_was_cut_short_comes_in_the_next_night(
    nights: Nights, faults: Faults, overlap: str, is_published_first: bool
) -> None:
    """1. The engine fails after some rows. 2. The next slot comes; what was written is published and swept

    before or after the other job is planned. 3. Nothing is left to a third night."""
    nights.change(overlap=overlap)
    nights.post(*range(20))
    nights.post(*range(20, 40))
    faults.fail_after(30)
    assert nights.night().job_state is JobState.FAILED
    assert nights.job().progress.samples_written
    faults.mend()
    nights.post(40)
    nights.submit()
    if is_published_first:
        nights.shop.publish()
        swept(nights)
    nights.work()
    swept(nights)
    first, second = nights.jobs()
    assert (first.state, second.state) == (JobState.COMPLETED, JobState.COMPLETED)
    assert nights.once() == names(range(41))
    assert nights.waiting() == []
    assert nights.night().detail == "no new samples"
    assert nights.job().progress.samples_known == 0


@pytest.mark.slow
def test_what_a_cut_short_job_wrote_comes_again_when_it_is_deleted(nights: Nights, faults: Faults) -> None:
    """1. A job fails after some rows. 2. The next slot cuts it short, and the next job takes the rest.

    3. It is cancelled and deleted before it is published. 4. A third night."""
    nights.post(*range(40))
    faults.fail_after(30)
    nights.night()
    first = nights.job()
    assert first.progress.samples_written
    faults.mend()
    nights.submit()
    nights.shop.plan()
    nights.store.write(jobs.cancel, first.id)
    delete(nights, first.id)
    nights.work()
    swept(nights)
    nights.night()
    assert nights.once() == names(range(40))
    swept(nights)
    assert nights.waiting() == []


@pytest.mark.parametrize("samples", ["new", "all"])
@pytest.mark.parametrize("is_planned", [False, True])
def test_what_a_deleted_job_took_comes_again(nights: Nights, is_planned: bool, samples: str) -> None:
    nights.change(samples=samples)
    nights.post(0, 1)
    nights.submit()
    if is_planned:
        nights.shop.plan()
    nights.store.write(jobs.cancel, nights.job().id)
    swept(nights)
    delete(nights, nights.job().id)
    assert len(nights.waiting()) == 1
    nights.night()
    assert nights.once() == names(range(2))


def test_what_a_job_took_that_wrote_nothing_is_the_next_nights_alone(nights: Nights, faults: Faults) -> None:
    """1. A job fails before it has written anything. 2. A night. 3. The first is deleted."""
    nights.post(0, 1)
    faults.fail_after(0)
    nights.night()
    failed = nights.job().id
    faults.mend()
    nights.night()
    swept(nights)
    delete(nights, failed)
    assert nights.once() == names(range(2))
    assert nights.waiting() == []


def test_a_stopped_job_of_all_samples_keeps_what_it_took(nights: Nights, faults: Faults) -> None:
    nights.change(samples="all")
    nights.post(0, 1)
    faults.fail_after(0)
    nights.night()
    failed = nights.job().id
    faults.mend()
    nights.post(2)
    nights.night()
    nights.store.write(jobs.resume, failed)
    nights.work()
    assert nights.once() == names(range(3))


def test_the_taken_files_of_a_complete_job_go_with_its_work_folder(nights: Nights) -> None:
    nights.post(0)
    nights.night()
    taken = nights.shop.settings.work_root / posted_path(nights.job().id)
    assert len(list(taken.iterdir())) == 1
    swept(nights)
    assert not taken.parent.exists()
