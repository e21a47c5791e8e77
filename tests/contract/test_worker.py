"""The worker process as a whole: what keeps its parts alive must not end in silence."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import select, update

import service.worker
from schemas.job import JobState
from schemas.schedule import NewSchedule
from schemas.worker import Role
from service.control.scheduling import submit_due
from service.errors import DiskFull, QuarryError, StoreUnavailable
from service.settings import Settings
from service.store import NewJob, Store, deletion, jobs, migration, plans, publishing, schedules, units
from service.store.schedule_tables import SCHEDULE
from service.store.tables import TASK
from service.store.values import TaskKind
from service.work import task_loop
from service.work.keeper import Keeper
from service.work.task_loop import TaskLoop
from service.worker import run_worker
from tests.contract.test_distrust import target
from tests.support import templates
from tests.support.children import wait_for_end
from tests.support.jobs import Shop, request as a_job_request
from tests.support.roles import PLANNING, PUBLISHING
from tests.support.store_cases import a_request, capture, job_id, submit
from tests.support.waiting import until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, poll_s=0.05)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    store = Store(settings.database())
    store.write(migration.migrate)
    yield store
    store.close()


@pytest.fixture
def keeper(store: Store, settings: Settings) -> Iterator[Keeper]:
    with Keeper(store, settings.lease_s) as keeper:
        yield keeper


def test_a_worker_whose_restarter_broke_ends_with_its_error(settings, monkeypatch):
    looks = iter([None])

    def failing(beside):
        if next(looks, "over") == "over":
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(TaskLoop, "restart_if_dead", failing)
    monkeypatch.setattr(service.worker, "RESTART_S", 0.05)
    with pytest.raises(ZeroDivisionError):
        run_worker(settings)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_captures_nothing_and_no_longer_keeps_its_leases_ends_with_that(settings, monkeypatch):
    """Its tasks would be given back at once, again and again."""

    def broken(keeper):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Keeper, "beat", broken)
    monkeypatch.setattr(service.worker, "RESTART_S", 0.05)
    with pytest.raises(QuarryError, match="leases are no longer kept"):
        run_worker(settings.model_copy(update={"roles": (Role.STORE, Role.FINISH), "lease_s": 1.0}))


def test_a_planner_that_was_killed_is_started_again_and_plans(settings, store):
    """1. The planner is alive and left alone. 2. It is killed. 3. The next one reads what is submitted."""
    with TaskLoop("planner", PLANNING, settings) as planner:
        killed = planner.running
        planner.restart_if_dead()
        assert planner.running is killed
        os.kill(killed.pid, signal.SIGKILL)
        wait_for_end(killed.pid)
        planner.restart_if_dead()
        assert planner.running.pid != killed.pid
        request = a_request().model_copy(update={"model": "/nowhere"})
        store.write(jobs.submit, NewJob.of(job_id(1), "key", request))
        asyncio.run(until(lambda: store.read(jobs.state, job_id(1)) is JobState.FAILED))
        assert planner.running.is_alive()


@pytest.mark.slow
def test_a_worker_until_idle_ends_when_every_job_rests(tmp_path):
    """1. Of three jobs one is paused, one asks for a layer that is not there. 2. The worker ends."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, lease_s=600.0)
    samples = [{"text": "a row"}]
    whole = shop.submit(a_job_request(model, samples, loss="all", layers=[2], canary="skip"), "whole")
    paused = shop.submit(a_job_request(model, samples, loss="all", layers=[2]), "paused")
    failed = shop.submit(a_job_request(model, samples, loss="all", layers=[99]), "failed")
    shop.store.write(jobs.pause, paused)
    assert run_worker(shop.settings, until_idle=True) == 0
    states = [shop.store.read(jobs.state, job_id) for job_id in (whole, paused, failed)]
    assert states == [JobState.COMPLETED, JobState.PAUSED, JobState.FAILED]
    assert not (shop.settings.work_root / whole).exists(), "the plans of a completed job are left"
    shop.store.close()


def test_a_worker_of_one_job_that_is_deleted_ends_as_for_one_that_is_not_complete(settings, store):
    submit(store)
    store.write(jobs.cancel, job_id(1))
    store.write(deletion.begin, job_id(1), with_dataset=True)
    assert run_worker(settings, only_job=job_id(1)) == service.worker.EXIT_JOB_NOT_COMPLETE


def test_a_worker_until_idle_that_is_stopped_before_says_by_which_signal(tmp_path, monkeypatch):
    """A batch system runs it again: 1. A slow job is captured. 2. SIGTERM. 3. Units of it are left."""
    monkeypatch.setenv("QUARRY_FAKE_STEP_S", "0.2")
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model, unit_max_samples=1, drain_s=0.1)
    samples = [{"text": f"row {number}"} for number in range(50)]
    job = shop.submit(a_job_request(model, samples, loss="all", layers=[2], canary="skip"), "slow")

    def stop_it():
        asyncio.run(until(lambda: shop.store.read(jobs.job, job).progress.units_done > 0))
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as beside:
        stopping = beside.submit(stop_it)
        assert run_worker(shop.settings, until_idle=True) == 128 + signal.SIGTERM
        stopping.result()
    assert shop.store.read(jobs.state, job) is JobState.RUNNING
    shop.store.close()


def scheduled(tmp_path: Path, **rules: str) -> Shop:
    """Open a shop with a schedule, whose slots come where a test says so: its own are years apart."""
    model = target(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    shop = Shop.open(tmp_path, model, source_roots=(tmp_path,))
    source = {"kind": "file", "path": "rows.jsonl"}
    request = {"model": str(model), "source": source, "layers": [2], "loss": "all", "canary": "skip"}
    body = {"name": "nightly", "cron": "0 3 29 2 *", "request": request}
    shop.store.write(schedules.add, NewSchedule.model_validate(body | rules))
    return shop


def let_a_slot_come(store: Store) -> None:
    with store.writing() as tx:
        tx.connection.execute(update(SCHEDULE).values(next_slot=tx.now))


def test_a_worker_makes_the_job_of_a_slot_and_runs_it(tmp_path):
    """1. A slot's time has come. 2. A worker that ends when nothing is left has run its job by then."""
    shop = scheduled(tmp_path)
    let_a_slot_come(shop.store)
    assert run_worker(shop.settings, until_idle=True) == 0
    run = shop.store.read(schedules.schedule_view, "nightly").last_run
    assert run.job_state is JobState.COMPLETED
    shop.store.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_publisher_that_ended_by_an_error_is_started_again(settings, keeper, monkeypatch):
    """1. The publisher meets a bug, and its thread ends. 2. The next one works. 3. It ends in order."""
    bugs = iter([ZeroDivisionError("a bug")])
    works = threading.Event()

    def publish(*_, **__):
        if (bug := next(bugs, None)) is not None:
            raise bug
        works.set()
        return False

    monkeypatch.setattr("service.publish.publisher.run_publishing", publish)
    with TaskLoop("publisher", PUBLISHING, settings, (store, keeper)) as publisher:
        publisher.running.join(60)
        assert not works.is_set()
        publisher.restart_if_dead()
        assert works.wait(60)
        again = publisher.running
        publisher.restart_if_dead()
        assert publisher.running is again
    assert not again.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [False, True], ids=["in order", "killed in the end"])
def test_a_plan_is_given_back_when_the_service_stops(tmp_path, settings, store, monkeypatch, stuck):
    """1. A plan of many units goes on. 2. The planner is stopped. 3. Another one need not wait."""
    monkeypatch.setattr(task_loop, "STOP_S", 0.1 if stuck else 600.0)
    settings = settings.model_copy(update={"model_roots": (tmp_path,), "unit_max_samples": 1})
    samples = [{"id": str(number), "text": "a row"} for number in range(2_000)]
    model = templates.write_target(tmp_path / "model")
    job = store.write(
        jobs.submit, NewJob.of(job_id(1), "key", a_job_request(model, samples, loss="all", layers=[2]))
    )[0].id
    with TaskLoop("planner", PLANNING, settings) as planner:
        asyncio.run(until(lambda: bool(store.read(units.of_job, job))))
        if stuck:
            os.kill(planner.running.pid, signal.SIGSTOP)
    assert planner.running.exitcode == (-signal.SIGKILL if stuck else 0)
    lease = plans.lease(store, "another", 60.0)
    assert lease is not None and lease.epoch == 2


def test_a_push_that_outlives_the_publishers_end_keeps_its_repository(settings, store, keeper, monkeypatch):
    """1. A commit to the Hub hangs. 2. The worker is stopped. 3. Nobody else commits beside it."""
    capture(store)
    begun, answered = threading.Event(), threading.Event()

    def publish(*_):
        begun.set()
        answered.wait(60)

    monkeypatch.setattr("service.publish.publisher._publish", publish)
    monkeypatch.setattr(task_loop, "STOP_S", 0.1)
    with TaskLoop("publisher", PUBLISHING, settings, (store, keeper)) as publisher:
        assert begun.wait(60)
    assert publishing.lease(store, "another", 60.0) is None
    answered.set()
    publisher.running.join(60)
    assert store.read(jobs.state, job_id(1)) is JobState.COMPLETED


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [StoreUnavailable("away"), DiskFull("it cannot grow")], ids=["away", "full"]
)
def test_a_worker_that_starts_without_a_database_waits_for_it(tmp_path, monkeypatch, error):
    """1. The database is away twice when a worker starts. 2. It works until nothing is left."""
    model = target(tmp_path)
    shop = Shop.open(tmp_path, model)
    body = a_job_request(model, [{"text": "a row"}], loss="all", layers=[2], canary="skip")
    job = shop.submit(body)
    healthy, errors = migration.migrate, iter([error, error])

    def migrate(tx):
        if (away := next(errors, None)) is not None:
            raise away
        healthy(tx)

    monkeypatch.setattr(migration, "migrate", migrate)
    assert run_worker(shop.settings, until_idle=True) == 0
    assert shop.store.read(jobs.state, job) is JobState.COMPLETED
    shop.store.close()


def test_a_worker_that_waits_for_its_database_ends_when_it_is_asked_to(settings, monkeypatch):
    def away(tx):
        signal.raise_signal(signal.SIGTERM)
        raise StoreUnavailable("away")

    monkeypatch.setattr(migration, "migrate", away)
    assert run_worker(settings.model_copy(update={"poll_s": 600.0})) == 0


@pytest.mark.slow
def test_a_signal_ends_what_an_idle_worker_does_last(settings, store, monkeypatch):
    """1. Every job rests. 2. There is no end to what is to be swept. 3. The worker is asked to end."""
    turns = []

    def sweep(context):
        if "last-turn" not in context.owner:
            return False
        turns.append(context.owner)
        if len(turns) == 2:
            signal.raise_signal(signal.SIGTERM)
        return True

    monkeypatch.setattr(service.worker, "run_sweep", sweep)
    assert run_worker(settings, until_idle=True) == 0
    assert len(turns) > 1


def test_a_push_that_outlives_its_worker_is_no_death(settings, store, monkeypatch):
    """1. A commit to the Hub hangs. 2. The worker is stopped, and ends. 3. The repository is free at once."""
    capture(store)
    begun, answered = threading.Event(), threading.Event()

    def publish(*_):
        begun.set()
        signal.raise_signal(signal.SIGTERM)
        answered.wait(60)

    monkeypatch.setattr("service.publish.publisher._publish", publish)
    monkeypatch.setattr(task_loop, "STOP_S", 0.1)
    assert run_worker(settings) == 0
    assert begun.is_set()
    with store.reading() as tx:
        deaths = tx.connection.scalar(select(TASK.c.deaths).where(TASK.c.kind == TaskKind.PUBLISH))
    assert publishing.lease(store, "another", 60.0) is not None and deaths == 0
    answered.set()


@pytest.mark.slow
def test_a_slot_that_waits_for_the_job_before_is_run_before_an_idle_worker_ends(tmp_path):
    """1. A slot waits for a job that goes on. 2. A worker until idle runs the job, and then the slot's."""
    shop = scheduled(tmp_path, overlap="queue", samples="all")
    for _ in range(2):
        let_a_slot_come(shop.store)
        submit_due(shop.store, shop.settings)
    assert shop.store.read(schedules.schedule_view, "nightly").waiting_slot is not None
    assert run_worker(shop.settings, until_idle=True) == 0
    states = [run.job_state for run in shop.store.read(schedules.past, "nightly")]
    assert states == [JobState.COMPLETED, JobState.COMPLETED]
    shop.store.close()


@pytest.mark.slow
def test_a_sweep_and_a_deletion_that_hang_delay_no_slot_and_no_planner(tmp_path, monkeypatch):
    """1. Both hang. 2. A slot comes, the planner is killed, and the slot's job is completed all the same."""
    shop = scheduled(tmp_path)
    released, hung = threading.Event(), []

    def hang(*_):
        hung.append(1)
        released.wait(60)
        return False

    monkeypatch.setattr("service.sweeper.run_sweep", hang)
    monkeypatch.setattr("service.control.deletion.run_deletion", hang)
    monkeypatch.setattr(task_loop, "STOP_S", 0.1)

    def user():
        asyncio.run(until(lambda: len(hung) == 2))
        for child in multiprocessing.active_children():
            if child.name == "quarry-planner":
                child.kill()
        let_a_slot_come(shop.store)
        asyncio.run(until(lambda: shop.store.read(jobs.counts)[JobState.COMPLETED] == 1))
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads:
        acting = threads.submit(user)
        assert run_worker(shop.settings) == 0
        released.set()
        acting.result()
    shop.store.close()


def test_a_job_that_is_pushed_nowhere_waits_for_no_upload(settings, store, monkeypatch):
    """1. As many uploads hang as there are publishers. 2. A younger job without a repository completes."""
    for number in range(1, settings.publishers + 1):
        capture(store, number=number, repo_id=f"org/{number}")
    capture(store, number=9)
    begun, answered = threading.Semaphore(0), threading.Event()

    def publish(store, settings, lease, *_):
        if lease.job_id != job_id(9):
            begun.release()
            answered.wait(60)

    def user():
        for _ in range(settings.publishers):
            begun.acquire()
        asyncio.run(until(lambda: store.read(jobs.state, job_id(9)) is JobState.COMPLETED))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("service.publish.publisher._publish", publish)
    monkeypatch.setattr(task_loop, "STOP_S", 0.1)
    with ThreadPoolExecutor(1) as threads:
        acting = threads.submit(user)
        assert run_worker(settings) == 0
        answered.set()
        acting.result()
