"""The publisher on a real store and a loopback Hub: what becomes of a job whose units are all done."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from schemas.job import JobState
from schemas.names import FINAL_NORM_PATH, manifest_path
from schemas.request import HubTarget
from service.artifacts.repository import Patience
from service.publish.assemble import intact_manifest
from service.settings import Settings
from service.store import NewJob, Store, canaries, jobs, migration, plans
from tests.support.desk import REPO, TOKEN, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import (
    FINAL_NORM,
    JOB,
    OWNER,
    TTL_S,
    a_canary,
    a_provenance,
    a_reject,
    a_request,
    an_identity,
    run_to_publishing,
)
from tests.support.hub_state import Token
from tests.support.roles import run_publishing
from tests.support.store_cases import Clock


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def settings(tmp_path: Path, hub: FakeHub) -> Settings:
    return Settings(data_dir=tmp_path / "data", hub_endpoint=hub.url, hub_token=TOKEN)


@pytest.fixture
def store(settings: Settings, clock: Clock) -> Iterator[Store]:
    settings.data_dir.mkdir()
    store = Store(settings.database(), clock.of(settings.database()))
    store.write(migration.migrate)
    yield store
    store.close()


def publish(store: Store, settings: Settings) -> bool:
    patience = Patience(attempts=3, sleep=lambda _: None)
    return run_publishing(store, settings, OWNER, lambda: False, patience=patience)


def prepare(
    store: Store, settings: Settings, job_id: str = JOB, repo_id: str | None = REPO, **changes: str
) -> None:
    request = a_request(HubTarget(repo_id=repo_id) if repo_id else None).model_copy(update=changes)
    run_to_publishing(store, settings.dataset_dir(job_id), job_id, request)


def test_a_finished_job_is_completed_with_the_commit_that_holds_it(
    store: Store, settings: Settings, hub: FakeHub
) -> None:
    prepare(store, settings)
    assert publish(store, settings)
    job = store.read(jobs.job, JOB)
    assert job.state is JobState.COMPLETED
    assert job.view().hub_commit == job.hub_commit == hub.repo(REPO).head.oid
    manifest = intact_manifest(settings.dataset_dir(JOB) / manifest_path(JOB))
    assert manifest.totals.samples_planned == job.progress.samples_planned == 7
    assert manifest.totals.samples_rejected == 1
    assert manifest.checks.canary == "passed"
    assert manifest.checks.canary_report == a_canary()
    assert not publish(store, settings)


def test_a_job_without_a_repository_is_completed_with_its_folder_alone(
    store: Store, settings: Settings, hub: FakeHub
) -> None:
    prepare(store, settings, repo_id=None)
    assert publish(store, settings)
    assert store.read(jobs.state, JOB) is JobState.COMPLETED
    assert store.read(jobs.job, JOB).hub_commit is None
    folder = settings.dataset_dir(JOB)
    assert (folder / FINAL_NORM_PATH).read_bytes() == FINAL_NORM
    assert (folder / "README.md").is_file()
    assert not hub.calls


def test_a_canary_that_was_skipped_is_told_in_the_manifest(store: Store, settings: Settings) -> None:
    prepare(store, settings, repo_id=None, canary="skip")
    publish(store, settings)
    checks = intact_manifest(settings.dataset_dir(JOB) / manifest_path(JOB)).checks
    assert (checks.canary, checks.canary_report) == ("skipped by request", None)


def test_a_job_whose_canary_nobody_recorded_is_not_published(store: Store, settings: Settings) -> None:
    run_to_publishing(store, settings.dataset_dir(JOB), JOB, a_request(), canary=False)
    publish(store, settings)
    assert store.read(jobs.state, JOB) is JobState.FAILED
    assert "no canary is recorded" in store.read(jobs.job, JOB).problem.detail
    assert not (settings.dataset_dir(JOB) / manifest_path(JOB)).exists()


def test_a_job_that_relies_on_an_earlier_canary_keeps_its_numbers(store: Store, settings: Settings) -> None:
    prepare(store, settings, repo_id=None)
    earlier = a_canary("j-" + "e" * 16)
    store.write(canaries.record, canaries.canary_digest(a_provenance(JOB, an_identity())), earlier)
    publish(store, settings)
    checks = intact_manifest(settings.dataset_dir(JOB) / manifest_path(JOB)).checks
    assert (checks.canary, checks.canary_report) == ("cached", earlier)


def test_a_denied_job_is_blocked_and_continues_when_the_right_is_given(
    store: Store, settings: Settings, hub: FakeHub, clock: Clock
) -> None:
    """Its manifest, which was made before the push was denied, says the same of it afterwards."""
    hub.add_token(TOKEN, Token("me", role="read", orgs={"org": "write"}))
    prepare(store, settings)
    captured_at = datetime.fromtimestamp(clock.now_s, UTC)
    assert publish(store, settings)
    job = store.read(jobs.job, JOB)
    assert job.state is JobState.BLOCKED
    assert job.problem is not None
    assert (job.problem.type, job.problem.field) == ("urn:quarry:hub-denied", "hub.repo_id")
    hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
    manifest = settings.dataset_dir(JOB) / manifest_path(JOB)
    before = manifest.read_bytes()
    clock.advance(3600)
    store.write(jobs.resume, JOB)
    assert plans.lease(store, OWNER, TTL_S) is None
    assert publish(store, settings)
    assert store.read(jobs.state, JOB) is JobState.COMPLETED
    assert manifest.read_bytes() == before
    assert intact_manifest(manifest).captured_at == captured_at


def test_a_job_whose_every_sample_was_rejected_fails_naming_the_source(
    store: Store, settings: Settings
) -> None:
    store.write(jobs.submit, NewJob.of(JOB, JOB, a_request()))
    plan = plans.lease(store, OWNER, TTL_S)
    assert plan is not None
    store.write(plans.set_identity, plan, an_identity())
    store.write(plans.finish, plan, [a_reject(0)])
    assert publish(store, settings)
    job = store.read(jobs.job, JOB)
    assert job.state is JobState.FAILED
    assert job.problem is not None
    assert (job.problem.type, job.problem.field) == ("urn:quarry:source-refused", "source")
    assert not (settings.dataset_dir(JOB) / manifest_path(JOB)).exists()


def test_a_shard_of_other_length_than_was_committed_fails_the_job(store: Store, settings: Settings) -> None:
    prepare(store, settings)
    shard = next((settings.dataset_dir(JOB) / "data").rglob("*.parquet"))
    with shard.open("ab") as file:
        file.write(b"x")
    assert publish(store, settings)
    job = store.read(jobs.job, JOB)
    assert job.state is JobState.FAILED
    assert job.problem is not None
    assert job.problem.type == "urn:quarry:dataset-broken"
    assert shard.name in job.problem.detail


def test_without_a_token_the_job_waits_for_one(store: Store, settings: Settings) -> None:
    prepare(store, settings)
    assert publish(store, settings.model_copy(update={"hub_token": None}))
    job = store.read(jobs.job, JOB)
    assert job.state is JobState.BLOCKED
    assert job.problem is not None
    assert "QUARRY_HUB_TOKEN_FILE" in (job.problem.cure or "")
