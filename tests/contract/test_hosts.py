"""Machines without the data folder: they capture and store; what a lost one held is captured again."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
from sqlalchemy import update

from schemas.job import JobState
from schemas.names import manifest_path
from schemas.worker import Role
from service import host
from service.capture import scratch
from service.capture.attempt_files import INDEX_FILE, attempt_folder
from service.control.deletion import delete_job
from service.errors import OptionRefused, StoreUnavailable
from service.settings import Settings
from service.store import HOME, commits, consumers, hosts, jobs, publishing, storing, tasks, units, workers
from service.store.tables import HOST
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.jobs import Shop, conversations, request
from tests.support.machines import Machine, hub_at_once, is_whole
from tests.support.roles import Capture, capture_until, give_up_lost, run_publishing, sweep

SAMPLES = 24
DAY = timedelta(days=1)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_at_once(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def shop(tmp_path: Path, target: Path, hub: FakeHub) -> Iterator[Shop]:
    shop = Shop.open(tmp_path, target, hub_endpoint=hub.url, hub_token=TOKEN, lease_s=3.0)
    host.host_of(shop.store, shop.settings)
    yield shop
    shop.store.close()


def submitted(
    shop: Shop, target: Path, hub: bool = True, retention: str | None = None, **changes: Any
) -> str:
    storage = {"shard_bytes": 65_536} | ({"retention": retention} if retention else {})
    place = {"hub": {"repo_id": REPO}} if hub else {}
    samples = conversations(SAMPLES, longest=20, asked_last="and then?")
    job_id = shop.submit(request(target, samples, layers=(1, 2), storage=storage, **place, **changes))
    shop.plan()
    assert shop.store.read(jobs.job, job_id).progress.units_planned >= 3
    return job_id


def test_a_machine_without_the_data_folder_captures_and_stores(
    shop: Shop, target: Path, hub: FakeHub, tmp_path: Path
) -> None:
    """1. It captures all. 2. Nothing is published before it has stored all. 3. Nothing is left there."""
    job_id, far = submitted(shop, target), Machine(shop, tmp_path / "far")
    far.capture(job_id)
    assert not run_publishing(shop.store, shop.settings, "publisher", lambda: False)
    assert far.files() and not shop.settings.dataset_dir(job_id).exists()
    while far.keep():
        pass
    assert not far.files()
    shop.publish()
    is_whole(shop, hub, job_id)
    assert not list(shop.settings.dataset_dir(job_id).rglob("train-*"))
    sweep(far.store, far.settings)
    assert [path.name for path in far.settings.data_dir.rglob("*") if path.is_file()] == [host.HOST_FILE]


def test_two_machines_and_the_data_folder_share_a_job(
    shop: Shop, target: Path, hub: FakeHub, tmp_path: Path
) -> None:
    job_id = submitted(shop, target)
    near, far = Machine(shop, tmp_path / "near"), Machine(shop, tmp_path / "far")
    near.capture(job_id, units_done=1)
    far.capture(job_id, units_done=2)
    shop.capture(job_id)
    assert near.keep() and far.keep()
    shop.publish()
    is_whole(shop, hub, job_id)
    made = {made.host for made in shop.store.read(commits.unit_commits, job_id)}
    assert made == {HOME, near.number, far.number}


def make_silent(shop: Shop, lost: Machine) -> None:
    """Let a machine have been silent for a day, in which the data folder's host was there."""
    with shop.store.writing() as tx:
        tx.connection.execute(update(HOST).where(HOST.c.number == lost.number).values(seen_at=tx.now - DAY))
        at_home = update(HOST).where(HOST.c.number == HOME)
        tx.connection.execute(at_home.values(there_since=tx.now - DAY, seen_at=tx.now))


@pytest.mark.parametrize("turns", [None, "last", "all"])
def test_what_a_lost_machine_held_is_captured_again(
    shop: Shop, target: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: str | None
) -> None:
    """1. It captures all and is lost. 2. Another captures what it had not stored, with the answers that were
    given. 3. It comes back and stores nothing; its files are swept."""
    generate = {"generate": {"max_tokens": 5, "turns": turns}} if turns else {}
    job_id, lost = submitted(shop, target, **generate), Machine(shop, tmp_path / "lost")
    monkeypatch.setattr(storing, "FULL_FILES", 1)
    lost.capture(job_id, units_done=2)
    assert lost.keep()
    lost.capture(job_id)
    first = shop.store.read(commits.readable, job_id, after=-1, limit=100)
    assert len(first.units) == shop.store.read(jobs.job, job_id).progress.units_stored, "and no other"
    files = [made.files[-1] for made in shop.store.read(commits.unit_commits, job_id) if not made.is_stored]
    told = answered(lost)
    make_silent(shop, lost)
    give_up_lost(shop.store, shop.settings)
    progress = shop.store.read(jobs.job, job_id).progress
    assert progress.units_done == progress.units_stored >= 1
    assert progress.units_planned - progress.units_done == len(files) >= 1
    assert not lost.keep()
    other = Machine(shop, tmp_path / "other")
    other.capture(job_id)
    assert told.items() <= answered(other).items()
    assert not lost.keep()
    while other.keep():
        pass
    shop.publish()
    is_whole(shop, hub, job_id)
    rest = shop.store.read(commits.readable, job_id, after=first.next_after, limit=100)
    assert sorted(unit.unit for unit in (*first.units, *rest.units)) == list(range(progress.units_planned))
    sweep(lost.store, lost.settings)
    assert not lost.files()


def answered(machine: Machine) -> dict[str, list[int]]:
    """The tokens of the samples that lie on a machine."""
    rows: dict[str, list[int]] = {}
    for index in (machine.settings.data_dir / "work").rglob(INDEX_FILE):
        table = pq.read_table(index, columns=["sample_id", "input_ids"])
        rows |= dict(zip(table["sample_id"].to_pylist(), table["input_ids"].to_pylist(), strict=True))
    return rows


def test_a_machine_that_only_stores_is_not_silent(shop: Shop, target: Path, tmp_path: Path) -> None:
    """1. It captured and has been away. 2. It comes back to store what it has."""
    job_id, far = submitted(shop, target), Machine(shop, tmp_path / "far")
    far.capture(job_id, units_done=1)
    make_silent(shop, far)
    assert shop.store.read(hosts.silent, shop.settings.host_lost_s) == [far.id]
    loop = Capture(far.store, far.settings.model_copy(update={"roles": (Role.STORE,)}), "far")
    capture_until(lambda: not shop.store.read(hosts.silent, shop.settings.host_lost_s), loop)
    assert not shop.store.read(workers.present), "none that captures"


def test_a_machine_that_only_stores_ends_with_its_one_job(shop: Shop, target: Path, tmp_path: Path) -> None:
    job_id, far = submitted(shop, target), Machine(shop, tmp_path / "far")
    roles = far.settings.model_copy(update={"roles": (Role.STORE,)})
    asyncio.run(asyncio.wait_for(Capture(far.store, roles, "far", only_job=job_id).run(), 60))


def test_what_a_machine_lost_is_swept_while_the_job_goes_on(shop: Shop, target: Path, tmp_path: Path) -> None:
    job_id, lost = submitted(shop, target), Machine(shop, tmp_path / "lost")
    lost.capture(job_id, units_done=1)
    assert lost.files()
    assert shop.store.write(hosts.forget, lost.id) >= 1
    sweep(lost.store, lost.settings)
    assert not lost.files()
    assert shop.store.read(jobs.job, job_id).state is JobState.RUNNING


def test_what_the_data_folder_lost_to_a_machine_is_swept_while_the_job_goes_on(
    shop: Shop, target: Path, tmp_path: Path
) -> None:
    submitted(shop, target)
    lease = units.lease(shop.store, "near", 60.0)
    assert lease is not None
    left = attempt_folder(shop.settings, lease.attempt_id)
    left.mkdir(parents=True)
    assert not sweep(shop.store, shop.settings), "it may go on"
    shop.store.write(tasks.release, lease)
    far = Machine(shop, tmp_path / "far")
    assert units.lease(far.store, "far", 60.0, host=far.number) is not None
    assert sweep(shop.store, shop.settings) == [left]


def test_a_deleted_job_leaves_nothing_on_a_machine(shop: Shop, target: Path, tmp_path: Path) -> None:
    job_id, far = submitted(shop, target), Machine(shop, tmp_path / "far")
    far.capture(job_id, units_done=1)
    shop.store.write(jobs.cancel, job_id)
    sweep(far.store, far.settings)
    assert far.files(), "somebody may resume it"
    delete_job(shop.store, shop.settings, job_id, with_dataset=True)
    sweep(far.store, far.settings)
    assert not list((far.settings.data_dir / "work").iterdir())


def test_a_disk_that_stopped_jobs_fill_says_so(shop: Shop, target: Path, tmp_path: Path) -> None:
    """Their units stay for a resume, and nobody uploads them."""
    job_id, far = submitted(shop, target), Machine(shop, tmp_path / "far")
    far.capture(job_id, units_done=1)
    small = far.settings.model_copy(update={"scratch_bytes": 1})
    assert (scratch.full(far.store, small, (), far.number) or "").endswith("units to upload")
    shop.store.write(jobs.cancel, job_id)
    assert "of stopped jobs" in (scratch.full(far.store, small, (), far.number) or "")


@pytest.mark.parametrize(("away", "host_lost_s"), [(DAY, 1800.0), (timedelta(minutes=1), 60.0)])
def test_a_lost_machine_is_not_looked_for_before_it_could_be_back(
    shop: Shop, target: Path, tmp_path: Path, away: timedelta, host_lost_s: float
) -> None:
    """1. All were away with the database, or without power. 2. The data folder's host is back for a while."""
    job_id, far = submitted(shop, target), Machine(shop, tmp_path / "far")
    far.capture(job_id, units_done=1)
    settings = Settings.model_validate(shop.settings.model_dump() | {"host_lost_s": host_lost_s})
    with shop.store.writing() as tx:
        tx.connection.execute(update(HOST).values(seen_at=tx.now - away, there_since=tx.now - DAY))

    def units_done() -> int:
        give_up_lost(shop.store, settings)
        return shop.store.read(jobs.job, job_id).progress.units_done

    assert units_done() == 1
    shop.store.write(workers.seen, HOME)
    assert units_done() == 1
    with shop.store.writing() as tx:
        since = tx.now - timedelta(seconds=hosts.BACK_S)
        tx.connection.execute(update(HOST).where(HOST.c.number == HOME).values(there_since=since))
    shop.store.write(workers.seen, HOME)
    assert units_done() == 0


def test_a_job_that_is_pushed_nowhere_waits_for_the_data_folder(
    shop: Shop, target: Path, tmp_path: Path
) -> None:
    job_id, far = submitted(shop, target, hub=False), Machine(shop, tmp_path / "far")
    assert units.lease(far.store, "far", 60.0, host=far.number) is None
    far.store.write(workers.beat, "far", 60.0, host=far.number)
    assert "data folder" in (shop.store.read(jobs.job, job_id).waits or "")
    assert not any(shop.store.read(jobs.counts, "far").values()), "it may end, if it works until it is idle"
    shop.store.write(workers.beat, "near", 60.0)
    assert shop.store.read(jobs.job, job_id).waits is None


def test_a_database_has_one_data_folder(shop: Shop, tmp_path: Path) -> None:
    other = shop.settings.model_copy(update={"data_dir": tmp_path / "other"})
    with pytest.raises(OptionRefused, match="another one") as refused:
        host.host_of(shop.store, other)
    (home,) = shop.store.read(hosts.views)
    assert home.id in (refused.value.cure or "")
    assert shop.store.write(hosts.forget, home.id) == 0
    assert host.host_of(shop.store, other) == HOME
    with pytest.raises(OptionRefused, match="another one"):
        host.host_of(shop.store, shop.settings)


def test_a_data_folder_that_was_given_up_costs_what_it_had_not_pushed(
    shop: Shop, target: Path, hub: FakeHub, tmp_path: Path
) -> None:
    """1. All is captured and waits for its publication. 2. The folder is lost. 3. Another takes its place."""
    job_id = submitted(shop, target)
    shop.capture(job_id)
    again = given_up(shop, tmp_path / "new")
    assert again.store.read(jobs.job, job_id).progress.units_done == 0
    again.capture(job_id)
    again.publish()
    is_whole(again, hub, job_id)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [jobs.pause, jobs.cancel, None])
def test_a_data_folder_is_given_up_whatever_its_jobs_do(shop: Shop, target: Path, stop: Any) -> None:
    """What is pushed nowhere ends, or has ended; it does not keep the place from another folder."""
    job_id = submitted(shop, target, hub=False)
    shop.capture(job_id)
    if stop is not None:
        shop.store.write(stop, job_id)
    (home,) = shop.store.read(hosts.views)
    assert shop.store.write(hosts.forget, home.id) == 0
    assert shop.store.read(jobs.state, job_id) is (JobState.CANCELLED if stop else JobState.FAILED)


def test_a_data_folder_is_given_up_with_what_was_consumed_of_a_job(shop: Shop, target: Path) -> None:
    """Its shards have been read, but what names them was there alone."""
    job_id = submitted(shop, target, hub=False, retention="consumed")
    Machine(shop, shop.settings.data_dir).capture(job_id, units_done=1)
    last = shop.store.read(commits.readable, job_id, after=-1, limit=100).next_after
    shop.store.write(consumers.acknowledge, job_id, "one", last, None)
    (home,) = shop.store.read(hosts.views)
    shop.store.write(hosts.forget, home.id)
    assert shop.store.read(jobs.state, job_id) is JobState.FAILED


def given_up(shop: Shop, folder: Path) -> Shop:
    """Give the data folder up, and go on with another."""
    shop.store.write(hosts.forget, shop.store.read(hosts.views)[0].id)
    place = {"data_dir": folder, "database_url": shop.settings.database()}
    again = Shop(Settings.model_validate(dict(shop.settings) | place), shop.store)
    host.host_of(again.store, again.settings)
    return again


def test_what_a_lost_data_folder_had_pushed_is_not_looked_for_in_the_next(
    shop: Shop, target: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submitted(shop, target)
    monkeypatch.setattr(storing, "FULL_FILES", 1)
    near = Machine(shop, shop.settings.data_dir)
    assert near.number == HOME
    near.capture(job_id, units_done=1)
    assert near.keep()
    again = given_up(shop, tmp_path / "new")
    again.capture(job_id)
    again.publish()
    is_whole(again, hub, job_id)


def test_a_data_folder_that_is_lost_before_its_last_commit_is_known_of_waits_for_a_person(
    shop: Shop, target: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. All is pushed. 2. The publisher dies, and the folder. 3. Another's shards differ."""
    job_id = submitted(shop, target)
    shop.capture(job_id)
    with monkeypatch.context() as dies:
        dies.setattr(publishing, "complete", Mock(side_effect=StoreUnavailable("it is away")))
        assert run_publishing(shop.store, shop.settings, "publisher", lambda: False)
    assert manifest_path(job_id) in hub.repo(REPO).head.tree
    again = given_up(shop, tmp_path / "new")
    again.capture(job_id)
    again.publish()
    job = again.store.read(jobs.job, job_id)
    assert job.state is JobState.FAILED and job.problem is not None
    assert "holds another run" in job.problem.detail and "resume" in str(job.problem.cure)


def test_files_that_a_machine_no_longer_has_fail_no_job(
    shop: Shop, target: Path, hub: FakeHub, tmp_path: Path
) -> None:
    job_id, far, other = (
        submitted(shop, target),
        *(Machine(shop, tmp_path / name) for name in ("far", "other")),
    )
    far.capture(job_id)
    rmtree(far.settings.work_root)
    assert far.keep()
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.RUNNING and job.problem is not None
    assert "no longer on" in job.problem.detail and "forget" in (job.problem.cure or "")
    shop.store.write(hosts.forget, far.id)
    other.capture(job_id)
    while other.keep():
        pass
    shop.publish()
    is_whole(shop, hub, job_id)


def test_a_folder_is_no_scratch_before_there_is_a_data_folder(tmp_path: Path, target: Path) -> None:
    """Or else the data folder, if such a worker comes first, would be scratch ever after."""
    shop = Shop.open(tmp_path, target)
    with pytest.raises(StoreUnavailable, match="no data folder"):
        Machine(shop, shop.settings.data_dir)
    assert host.host_of(shop.store, shop.settings) == HOME
    assert Machine(shop, shop.settings.data_dir).number == HOME
    shop.store.close()


def test_a_machine_that_lacks_the_model_fails_no_job(shop: Shop, target: Path, tmp_path: Path) -> None:
    job_id = submitted(shop, target)
    far = Machine(shop, tmp_path / "far", model_roots=(), poll_s=0.01, engine_rest_s=0.5)
    loop = Capture(far.store, far.settings, "far")
    capture_until(lambda: far.store.read(jobs.state, job_id) is not JobState.RUNNING, loop, at_once=True)
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert "not here as it was planned" in job.problem.detail
    shop.store.write(jobs.resume, job_id)
    shop.capture(job_id)
    shop.publish()
    assert shop.store.read(jobs.job, job_id).state is JobState.COMPLETED
