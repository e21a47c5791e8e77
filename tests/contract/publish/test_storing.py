"""Captured units are in the repository before the last one is captured, and nobody is told of them yet."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from schemas.job import JobState, JobSummary
from schemas.names import CARD_PATH, FINAL_NORM_PATH, index_path, manifest_path, shard_path
from schemas.request import HubTarget
from service.artifacts.repository import Patience
from service.host import host_of
from service.settings import Settings
from service.store import Store, Transaction, commits, hosts, jobs, migration, storing, units
from service.store.tables import UNIT_COMMIT
from tests.support.desk import REPO, TOKEN, etags, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import (
    JOB,
    OTHER_NORM,
    OWNER,
    a_commit,
    a_dataset,
    a_request,
    capture_unit,
    run_to_publishing,
)
from tests.support.hub_state import Fault, Token
from tests.support.roles import run_publishing, run_storing, sweep
from tests.support.store_cases import Clock

UNITS, FULL_FILES = 5, 4
TEN_MINUTES_S = 600.0


class Run:
    """A job that is being captured: three of its five units are."""

    def __init__(
        self, root: Path, hub: FakeHub, target: HubTarget | None, *, keep_local: bool = True
    ) -> None:
        self.hub, self.clock = hub, Clock(1_000_000_000.0)
        self.settings = Settings(data_dir=root / "data", hub_endpoint=hub.url, hub_token=TOKEN)
        self.store = Store(self.settings.database(), self.clock.of(self.settings.database()))
        self.store.write(migration.migrate)
        self.dataset = self.settings.dataset_dir(JOB)
        request = a_request(target)
        storage = request.storage.model_copy(update={"keep_local": keep_local})
        request = request.model_copy(update={"storage": storage})
        run_to_publishing(self.store, self.dataset, JOB, request, num_units=UNITS, captured=3)

    def keep(self) -> bool:
        """Store once, under a lease of its own; say whether there was something to store."""
        self.clock.advance(storing.APART.total_seconds() + 1)
        patience = Patience(attempts=2, sleep=lambda _: None)
        return run_storing(self.store, self.settings, "storer", lambda: False, patience=patience)

    def publish(self) -> JobSummary:
        assert run_publishing(self.store, self.settings, OWNER, lambda: False)
        return self.job()

    def job(self) -> JobSummary:
        return self.store.read(jobs.job, JOB).view()

    def shards_here(self) -> list[int]:
        return [unit for unit in range(UNITS) if (self.dataset / shard_path(JOB, unit)).exists()]

    def units_there(self) -> list[int]:
        there = self.hub.repo(REPO).head.tree
        units = [unit for unit in range(UNITS) if shard_path(JOB, unit) in there]
        assert units == [unit for unit in range(UNITS) if index_path(JOB, unit) in there]
        return units


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(storing, "FULL_FILES", FULL_FILES)
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def run(tmp_path: Path, hub: FakeHub) -> Iterator[Run]:
    run = Run(tmp_path, hub, HubTarget(repo_id=REPO))
    yield run
    run.store.close()


def test_units_that_fill_a_commit_are_stored_while_others_are_captured(run: Run) -> None:
    """1. Three units are captured, two fill a commit. 2. The others are captured. 3. All is published."""
    assert run.keep()
    assert run.units_there() == [0, 1]
    assert not {manifest_path(JOB), CARD_PATH} & run.hub.repo(REPO).head.tree.keys()
    job = run.job()
    assert (job.state, job.progress.units_stored, job.progress.units_done) == (JobState.RUNNING, 2, 3)
    capture_unit(run.store, run.dataset)
    assert run.keep() and run.units_there() == [0, 1, 2, 3]
    capture_unit(run.store, run.dataset)
    assert not run.keep(), "what is left goes with the publication"
    stored_files = run.hub.repo(REPO).head.tree
    job = run.publish()
    assert (job.state, job.progress.units_stored) == (JobState.COMPLETED, UNITS)
    there = run.hub.repo(REPO).head.tree
    assert {path: there[path] for path in stored_files} == stored_files
    pushed = {path: blob.etag for path, blob in there.items() if path != ".gitattributes"}
    assert pushed == etags(run.dataset)


def test_a_job_of_more_shards_than_its_repository_takes_fails_at_the_first_commit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.artifacts.folder_limit.MAX_FOLDER_FILES", UNITS - 1)
    assert run.keep()
    problem = run.job().problem
    assert run.job().state is JobState.FAILED
    assert problem is not None and problem.field == "storage.shard_bytes"


def test_a_host_that_is_given_up_meanwhile_does_not_make_a_unit_count_twice(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A repository takes as many shards as there are. 2. They are counted. 3. A host with one is lost."""
    monkeypatch.setattr("service.artifacts.folder_limit.MAX_FOLDER_FILES", UNITS)
    host_of(run.store, run.settings)
    far = run.store.write(hosts.register, "1" * 32, "far", is_home=False)
    of_far = update(UNIT_COMMIT).where(UNIT_COMMIT.c.unit == 2).values(host=far)
    run.store.write(lambda tx: tx.connection.execute(of_far))
    count = commits.num_shards

    def lose_the_host(tx: Transaction, job_id: str) -> int:
        counted = count(tx, job_id)
        assert run.store.write(hosts.forget, "1" * 32) == 1
        return counted

    monkeypatch.setattr(commits, "num_shards", lose_the_host)
    assert run.keep()
    assert run.job().state is JobState.RUNNING and run.units_there() == [0, 1]


def test_a_unit_of_more_shards_than_others_does_not_speak_for_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five units have six shards, as many as the repository takes; the one of two is stored alone."""
    monkeypatch.setattr("service.artifacts.folder_limit.MAX_FOLDER_FILES", UNITS + 1)
    for _ in range(2):
        run.clock.advance(TEN_MINUTES_S)
        run.keep()
    lease = units.lease(run.store, OWNER, 3600.0)
    assert lease is not None
    made = a_commit(run.dataset, lease.attempt_id, lease.identity, 3)
    (shard,) = made.shards
    paths = [shard_path(JOB, lease.item, rank, 2) for rank in range(2)]
    for path in paths:
        shutil.copy(run.dataset / shard.path, run.dataset / path)
    shards = [shard.model_copy(update={"path": path, "rows": 1 + rank}) for rank, path in enumerate(paths)]
    run.store.write(commits.commit, replace(made, shards=tuple(shards)), lease)
    run.clock.advance(TEN_MINUTES_S)
    assert run.keep() and run.job().progress.units_stored == 4
    assert run.job().state is JobState.RUNNING


def test_fewer_units_wait_for_others_but_not_forever(run: Run) -> None:
    run.keep()
    assert not run.keep()
    run.clock.advance(TEN_MINUTES_S - 100)
    assert not run.keep()
    run.clock.advance(100)
    assert run.keep() and run.units_there() == [0, 1, 2]
    assert run.job().progress.units_stored == 3


@pytest.mark.parametrize("harm", ["away", "denied"])
def test_a_repository_that_takes_nothing_delays_no_capture(run: Run, harm: str) -> None:
    """1. The Hub answers 503, or the token lost its right. 2. The job says so and runs. 3. It is stored."""
    if harm == "away":
        run.hub.fail("commit", Fault(status=503, times=10_000))
    else:
        run.hub.add_token(TOKEN, Token("me", role="read", orgs={"org": "write"}))
    assert run.keep()
    assert run.job().state is JobState.RUNNING
    problem = run.job().problem
    assert problem is not None
    assert problem.type == ("urn:quarry:hub-unavailable" if harm == "away" else "urn:quarry:hub-denied")
    capture_unit(run.store, run.dataset)
    run.hub.heal()
    run.hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
    run.clock.advance(run.settings.lease_s)
    assert run.keep() and run.units_there() == [0, 1]
    assert run.job().problem is None


def test_a_repository_of_another_model_fails_the_job_before_a_byte_is_sent(run: Run, tmp_path: Path) -> None:
    run.hub.add_repo(REPO, {FINAL_NORM_PATH: OTHER_NORM}, private=True)
    assert run.keep()
    job = run.job()
    assert job.state is JobState.FAILED and job.problem is not None
    assert job.problem.detail == f"{REPO} holds the states of another model"
    assert run.units_there() == []


def test_another_run_of_the_job_is_not_added_to(run: Run, tmp_path: Path) -> None:
    a_dataset(tmp_path / "other", num_units=UNITS, rows=2)
    content = (tmp_path / "other" / manifest_path(JOB)).read_bytes()
    run.hub.add_repo(REPO, {manifest_path(JOB): content}, private=True)
    assert run.keep()
    job = run.job()
    assert job.state is JobState.FAILED and job.problem is not None
    assert job.problem.detail == f"{REPO} holds another run of {JOB}"
    assert run.units_there() == []


def test_the_publication_takes_over_from_a_storer_in_the_middle(run: Run) -> None:
    """1. While two units are uploaded the last ones are captured. 2. The storer ends. 3. All is published."""

    def capture_the_rest() -> None:
        capture_unit(run.store, run.dataset)
        capture_unit(run.store, run.dataset)

    run.hub.meanwhile("preupload", capture_the_rest)
    assert run.keep()
    job = run.job()
    assert (job.state, job.progress.units_stored, job.problem) == (JobState.RUNNING, 0, None)
    assert not run.keep()
    assert run.publish().state is JobState.COMPLETED
    assert run.units_there() == list(range(UNITS))


def test_a_job_that_is_pushed_nowhere_has_nothing_to_store(tmp_path: Path, hub: FakeHub) -> None:
    run = Run(tmp_path, hub, None)
    run.clock.advance(TEN_MINUTES_S)
    assert not run.keep()
    run.store.close()


@pytest.fixture
def passing(tmp_path: Path, hub: FakeHub) -> Iterator[Run]:
    run = Run(tmp_path, hub, HubTarget(repo_id=REPO), keep_local=False)
    yield run
    run.store.close()


def test_shards_that_are_not_kept_leave_when_the_repository_has_them(passing: Run) -> None:
    """1. Two of three units are stored. 2. The rest is captured and published. 3. No shard is left here."""
    hashes = etags(passing.dataset)
    assert passing.keep() and passing.shards_here() == [2]
    capture_unit(passing.store, passing.dataset)
    capture_unit(passing.store, passing.dataset)
    hashes |= etags(passing.dataset)
    job = passing.publish()
    assert (job.state, job.progress.units_stored) == (JobState.COMPLETED, UNITS), job.problem
    assert passing.units_there() == list(range(UNITS)) and passing.shards_here() == []
    there = passing.hub.repo(REPO).head.tree
    assert {path: there[path].etag for path in hashes if path.startswith(("data", "index"))} == {
        path: etag for path, etag in hashes.items() if path.startswith(("data", "index"))
    }
    assert (passing.dataset / manifest_path(JOB)).exists()


def test_a_shard_that_the_repository_lost_meanwhile_is_missed(passing: Run) -> None:
    """A publication names it: it is neither here nor there, and no manifest says that it is."""
    passing.keep()
    del passing.hub.repo(REPO).head.tree[shard_path(JOB, 1)]
    capture_unit(passing.store, passing.dataset)
    capture_unit(passing.store, passing.dataset)
    job = passing.publish()
    assert job.state is not JobState.COMPLETED and job.problem is not None
    assert f"{shard_path(JOB, 1)} is missing" in job.problem.detail
    assert manifest_path(JOB) not in passing.hub.repo(REPO).head.tree


def test_a_shard_stays_while_the_repository_does_not_show_it(passing: Run) -> None:
    """1. The commit is answered, and the file is not there. 2. Nothing is unlinked, nothing counts."""

    def lose() -> None:
        passing.hub.repo(REPO).head.tree.pop(shard_path(JOB, 0), None)

    committed = threading.Event()

    def on_paths_info() -> None:
        if ("dataset", REPO) in passing.hub.repos and shard_path(JOB, 0) in passing.hub.repo(REPO).head.tree:
            committed.set()
            lose()
        passing.hub.meanwhile("paths_info", on_paths_info)

    passing.hub.meanwhile("paths_info", on_paths_info)
    assert passing.keep() and committed.is_set()
    job = passing.job()
    assert (job.state, job.progress.units_stored) == (JobState.RUNNING, 0)
    assert job.problem is not None and "does not hold it as it was sealed" in job.problem.detail
    assert passing.shards_here() == [0, 1, 2]


def test_what_a_crash_left_of_a_stored_unit_is_swept(passing: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.publish.storing.remove_paths", lambda *_: None)
    passing.keep()
    assert passing.shards_here() == [0, 1, 2] and passing.job().progress.units_stored == 2
    (passing.settings.work_root / JOB).mkdir(parents=True)
    sweep(passing.store, passing.settings)
    assert passing.shards_here() == [2]
    capture_unit(passing.store, passing.dataset)
    capture_unit(passing.store, passing.dataset)
    monkeypatch.setattr("service.publish.publisher.remove_stored", lambda *_: None)
    assert passing.publish().state is JobState.COMPLETED
    assert passing.shards_here() == [2, 3, 4]
    (passing.settings.work_root / JOB).mkdir(parents=True, exist_ok=True)
    sweep(passing.store, passing.settings)
    assert passing.shards_here() == []
