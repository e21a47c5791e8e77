"""A schedule's runs take what earlier ones have not written, night after night on the fake engine."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import select

from schemas.job import JobState
from schemas.names import known_hashes_path, manifest_path
from schemas.schedule import RunOutcome
from service.control import scheduling
from service.control.deletion import delete_job
from service.errors import IllegalMove
from service.publish.assemble import intact_manifest
from service.publish.card import assigned_configs
from service.reader import QuarryDataset
from service.reader.errors import JobsDiffer
from service.store import commits, jobs, schedules
from service.store.schedule_tables import CAPTURED_SAMPLES
from tests.support.desk import REPO, TOKEN, writable_hub
from tests.support.nights import NAME, Faults, Nights, hang, names, open_nights, plan_some


@pytest.fixture
def nights(tmp_path: Path, target: Path) -> Iterator[Nights]:
    opened = open_nights(tmp_path, target, f"sqlite:///{tmp_path / 'quarry.db'}")
    yield opened
    opened.store.close()


def test_a_night_takes_what_earlier_nights_have_not_written(nights: Nights) -> None:
    nights.drop(range(5))
    nights.night()
    nights.drop(range(3, 9))
    run = nights.night()
    assert run.outcome is RunOutcome.SUBMITTED and run.job_state is JobState.COMPLETED
    progress = nights.job().progress
    assert (progress.samples_known, progress.samples_planned, progress.samples_written) == (7, 4, 4)
    assert progress.samples_rejected == 0
    assert nights.once() == names(range(9))


def test_what_was_written_stays_known_when_the_request_is_changed(nights: Nights, tmp_path: Path) -> None:
    """1. A night. 2. Another folder, which has some of its samples, too. 3. Another recipe."""
    nights.drop(range(5))
    nights.night()
    nights.folder = tmp_path / "incoming" / "elsewhere"
    nights.folder.mkdir()
    nights.drop(range(3, 9))
    request = nights.rules.request.model_dump(mode="json")
    request["source"]["path"] = str(nights.folder)
    nights.change(request=request)
    nights.night()
    progress = nights.job().progress
    assert (progress.samples_known, progress.samples_written) == (2, 4)
    assert nights.once() == names(range(9))
    nights.change(request=request | {"layers": [1]})
    nights.night()
    failed = nights.job()
    assert failed.state is JobState.FAILED and failed.problem is not None
    assert failed.problem.type == "urn:quarry:recipe-changed"


def test_a_sample_is_known_by_its_content_and_not_by_its_name(nights: Nights) -> None:
    nights.drop(range(4), "a.jsonl")
    nights.night()
    text = (nights.folder / "a.jsonl").read_text()
    (nights.folder / "a.jsonl").rename(nights.folder / "moved.jsonl")
    (nights.folder / "renamed.jsonl").write_text(text.replace('"id": "s', '"id": "other'))
    nights.drop([9], "b.jsonl")
    nights.night()
    assert nights.job().progress.samples_known == 8
    assert nights.once() == names(range(4), range(9, 10))


def test_a_night_without_new_samples_ends_as_such(nights: Nights) -> None:
    nights.drop(range(4))
    nights.night()
    run = nights.night()
    assert (run.job_state, run.detail) == (JobState.COMPLETED, "no new samples")
    job = nights.job()
    assert (job.progress.samples_known, job.progress.samples_planned, job.hub_commit) == (4, 0, None)
    assert not nights.shop.settings.dataset_dir(job.id).exists()
    assert not nights.store.read(schedules.schedule_view, NAME).failing
    assert nights.once() == names(range(4))


def test_a_source_without_rows_is_no_failure_of_a_schedule(nights: Nights) -> None:
    nights.drop([])
    assert nights.night().detail == "no new samples"
    nights.change(samples="all")
    assert nights.night().job_state is JobState.FAILED
    problem = nights.job().problem
    assert problem is not None and "no row" in problem.detail


def test_a_reject_of_the_plan_is_judged_each_night_and_one_of_the_engine_once(nights: Nights) -> None:
    refused = '{"id": "refused", "token_ids": [13, 13, 8]}\n'
    (nights.folder / "a.jsonl").write_text(refused + '{"id": "empty", "text": ""}\n')
    nights.drop(range(3))
    nights.night()
    rejects = nights.store.read(commits.rejects, nights.job().id)
    assert [reject.source_id for reject in rejects] == ["refused", "empty"]
    nights.drop(range(3, 5))
    nights.night()
    rejects = nights.store.read(commits.rejects, nights.job().id)
    assert [reject.source_id for reject in rejects] == ["empty"]
    assert nights.once() == names(range(5))


def test_a_night_whose_samples_are_all_rejected_fails(nights: Nights) -> None:
    (nights.folder / "a.jsonl").write_text('{"id": "empty", "text": ""}\n')
    assert nights.night().job_state is JobState.FAILED


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["queue", "replace"])
def test_a_half_failed_night_keeps_what_it_wrote_and_the_next_takes_the_rest(
    nights: Nights, faults: Faults, overlap: str
) -> None:
    """1. The engine fails after the first units. 2. At the next slot the job ends with those, and cannot be
    resumed into the others. 3. The next job takes these: every sample is there once."""
    nights.change(overlap=overlap)
    nights.drop(range(40))
    faults.fail_after(30)
    assert nights.night().job_state is JobState.FAILED
    done = nights.job().progress.samples_written
    assert 0 < done < 40
    faults.mend()
    nights.drop(range(40, 42))
    nights.night()
    first, second = nights.jobs()
    assert (first.state, second.state) == (JobState.COMPLETED, JobState.COMPLETED)
    assert (first.progress.samples_written, first.progress.samples_given_up) == (done, 40 - done)
    assert (second.progress.samples_written, second.progress.samples_known) == (42 - done, done)
    assert nights.once() == names(range(42))
    runs = nights.store.read(schedules.past, NAME)
    assert [run.outcome for run in runs] == [RunOutcome.SUBMITTED, RunOutcome.CUT_SHORT]
    manifest = intact_manifest(nights.shop.settings.dataset_dir(first.id) / manifest_path(first.id))
    totals = manifest.totals
    assert (totals.samples_planned, totals.samples_given_up, totals.samples_known) == (done, 40 - done, 0)


def test_a_half_failed_night_that_is_resumed_in_time_goes_on(nights: Nights, faults: Faults) -> None:
    nights.drop(range(40))
    faults.fail_after(30)
    nights.night()
    faults.mend()
    nights.store.write(jobs.resume, nights.job().id)
    nights.work()
    assert nights.job().progress.samples_written == 40
    assert nights.night().detail == "no new samples"
    assert nights.once() == names(range(40))


def test_a_failed_night_that_wrote_nothing_cannot_be_resumed_beside_the_next(
    nights: Nights, faults: Faults
) -> None:
    nights.drop(range(4))
    faults.fail_after(0)
    nights.night()
    failed = nights.job().id
    faults.mend()
    nights.night()
    assert nights.store.read(jobs.state, failed) is JobState.FAILED
    with pytest.raises(IllegalMove, match="takes the samples"):
        nights.store.write(jobs.resume, failed)
    assert nights.once() == names(range(4))


def test_a_job_that_is_replaced_keeps_what_it_wrote(nights: Nights, faults: Faults) -> None:
    """1. A worker ends while units are in hand, after others were committed. 2. The next slot replaces it."""
    nights.change(overlap="replace")
    nights.drop(range(20))
    nights.submit()
    nights.shop.plan()
    hang(nights, faults, 12)
    nights.night()
    first, second = nights.jobs()
    assert first.state is JobState.COMPLETED and 0 < first.progress.samples_written < 20
    assert first.progress.samples_given_up == second.progress.samples_written
    assert nights.once() == names(range(20))


@pytest.mark.parametrize("is_lost", [False, True], ids=["file kept", "file lost"])
def test_a_planner_that_dies_leaves_out_the_same_samples_when_it_plans_again(
    nights: Nights, is_lost: bool
) -> None:
    """1. A night is known. 2. The planner of the next dies after some units, which are captured. 3. Its
    successor plans again: what the job itself has written is planned as before."""
    nights.drop(range(5))
    nights.night()
    nights.drop(range(5, 15))
    nights.submit()
    plan_some(nights, 2)
    planned = nights.job().progress
    assert planned.units_planned == 2 and not planned.plan_done
    nights.clock.advance(nights.shop.settings.lease_s + 1)
    nights.shop.patience_s = 5.0
    with suppress(TimeoutError):  # it waits for the rest of the plan
        nights.shop.capture(nights.job().id)
    assert nights.job().progress.units_done == 2
    if is_lost:
        (nights.shop.settings.work_root / known_hashes_path(nights.job().id)).unlink()
    nights.shop.patience_s = 120.0
    nights.work()
    assert nights.job().state is JobState.COMPLETED, nights.job().problem
    assert nights.job().progress.samples_known == 5
    assert nights.once() == names(range(15))


def test_another_template_is_refused_or_begins_anew(nights: Nights, tmp_path: Path) -> None:
    """1. A night. 2. The model's template changes: the next two fail and say so. 3. The schedule is told to
    begin anew: the job takes all samples. 4. The old template takes what is new under it alone."""
    nights.drop(range(4))
    nights.night()
    nights.change_template("other")
    nights.drop(range(4, 6))
    for _ in range(2):
        assert nights.night().job_state is JobState.FAILED
    problem = nights.job().problem
    assert problem is not None and problem.type == "urn:quarry:recipe-changed"
    assert "template_sha256" in problem.detail and nights.jobs()[0].id in problem.detail
    assert "begin_anew" in str(problem.cure)
    nights.change(changed_recipe="begin_anew")
    nights.store.write(jobs.resume, nights.job().id)
    nights.work()
    run = nights.run()
    assert run.job_state is JobState.COMPLETED and str(run.detail).startswith("begun anew: ")
    assert nights.job().progress.samples_written == 6
    for job in (nights.jobs()[0], nights.job()):
        shutil.copytree(nights.shop.settings.dataset_dir(job.id), tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(JobsDiffer, match="differ in revision"):
        QuarryDataset(tmp_path / "both")
    anew = QuarryDataset(tmp_path / "both", since=run.slot)
    assert sorted(anew.row(number).source_id or "" for number in range(6)) == names(range(6))
    nights.change_template("")
    nights.night()
    assert nights.job().progress.samples_known == 4
    old, new = nights.written().values()
    assert old == new == Counter(names(range(6)))


def test_what_changed_is_known_after_the_earlier_job_was_deleted(nights: Nights) -> None:
    nights.drop(range(3))
    nights.night()
    delete_job(nights.store, nights.shop.settings, nights.job().id, with_dataset=False)
    nights.drop(range(3, 5))
    nights.night()
    assert nights.job().progress.samples_known == 3
    delete_job(nights.store, nights.shop.settings, nights.job().id, with_dataset=False)
    nights.change_template("other")
    nights.night()
    problem = nights.job().problem
    assert problem is not None and problem.detail.count("template_sha256") == 1


@pytest.mark.slow
def test_a_failed_job_that_is_deleted_lets_its_samples_come_again(nights: Nights, faults: Faults) -> None:
    nights.drop(range(40))
    faults.fail_after(30)
    nights.night()
    assert nights.job().progress.samples_written
    faults.mend()
    delete_job(nights.store, nights.shop.settings, nights.job().id, with_dataset=True)
    nights.night()
    assert nights.once() == names(range(40))


def test_a_schedule_takes_what_it_wrote_with_it(nights: Nights) -> None:
    nights.drop(range(3))
    nights.night()
    nights.drop(range(3, 10))
    nights.submit()
    plan_some(nights, 1)
    nights.store.write(schedules.remove, NAME)
    nights.clock.advance(nights.shop.settings.lease_s + 1)
    nights.shop.plan()
    nights.shop.finish(nights.job().id)
    assert nights.job().progress.samples_written == 7, "its plan stays what it was"
    with nights.store.reading() as tx:
        assert tx.connection.execute(select(CAPTURED_SAMPLES)).all() == []


def test_all_samples_are_taken_where_that_is_asked_for(nights: Nights) -> None:
    nights.change(samples="all")
    nights.drop(range(3))
    nights.night()
    nights.night()
    assert [job.progress.samples_written for job in nights.jobs()] == [3, 3]


@pytest.mark.slow
def test_samples_of_another_recipe_are_pushed_apart(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset's index has all of them, and a night without new samples makes no commit."""
    with writable_hub(tmp_path, monkeypatch) as hub:
        nights = open_nights(
            tmp_path,
            target,
            f"sqlite:///{tmp_path / 'quarry.db'}",
            changed_recipe="begin_anew",
            request={"hub": {"repo_id": REPO}},
            settings={"hub_endpoint": hub.url, "hub_token": TOKEN},
        )
        nights.drop(range(3))
        nights.night()
        num_commits = len(hub.repo(REPO).commits)
        nights.night()
        assert len(hub.repo(REPO).commits) == num_commits
        nights.change_template("other")
        nights.drop(range(3, 5))
        for _ in range(2):
            assert nights.night().job_state is JobState.COMPLETED, nights.job().problem
            nights.drop(range(5, 6))
        first, _, *others = nights.jobs()
        identity = others[0].identity
        assert identity is not None
        apart = f"states-{identity.recipe_sha256()[:8]}"
        card = hub.repo(REPO).head.tree["README.md"].content
        assert card is not None
        configs = assigned_configs(card.decode())
        assert configs == {first.id: "states", **dict.fromkeys((job.id for job in others), apart)}
        nights.store.close()


def test_a_job_whose_schedule_was_deleted_before_it_was_planned_does_not_take_all_samples_again(
    nights: Nights,
) -> None:
    """1. A night. 2. The next slot's job waits. 3. The schedule is deleted."""
    nights.drop(range(4))
    nights.night()
    nights.drop(range(4, 6))
    nights.submit()
    job_id = nights.job().id
    scheduling.remove(nights.store, nights.shop.settings, NAME)
    nights.work()
    job = nights.store.read(jobs.job, job_id)
    assert job.state is JobState.FAILED and job.progress.samples_planned == 0
    assert job.problem is not None and "the schedule was deleted" in job.problem.detail
