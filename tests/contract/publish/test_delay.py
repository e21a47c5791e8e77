"""A push that stands still for a while: the job says why, goes on alone, and at last waits for a person."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.job import JobState, JobSummary
from service.artifacts.repository import Patience
from service.errors import DiskFull, QuarryError, StoreUnavailable
from service.publish import push
from service.store import jobs, plans, publishing
from tests.contract.publish.press import ATTEMPTS, HOUR_S, UNITS, Press
from tests.support.desk import REPO, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import JOB, OWNER
from tests.support.hub_state import Fault

UNAVAILABLE = Fault(status=503, times=10_000)
CONFLICT = 409
"""A status that may pass, and which the client itself never tries again."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def press(tmp_path: Path, hub: FakeHub) -> Iterator[Press]:
    press = Press(tmp_path, hub)
    yield press
    press.store.close()


def problem_type(job: JobSummary) -> str | None:
    return job.problem.type if job.problem is not None else None


def test_a_job_says_why_it_is_not_published_yet_until_it_is(press: Press, hub: FakeHub) -> None:
    """1. The Hub takes no commit. 2. It takes none again, which is no news. 3. It does."""
    hub.fail("commit", UNAVAILABLE)
    job = press.publish()
    assert (job.state, problem_type(job)) == (JobState.PUBLISHING, "urn:quarry:hub-unavailable")
    assert job.problem is not None and "answered 503" in job.problem.detail
    (told,) = press.told()
    assert (told.state, told.problem) == (JobState.PUBLISHING, job.problem)
    assert press.publish() == job and press.told() == [told]
    hub.heal()
    job = press.publish()
    assert (job.state, job.problem) == (JobState.COMPLETED, None)
    assert [event.message for event in press.told()] == ["publish is tried again", "publishing -> completed"]


def test_a_file_that_cannot_be_read_for_a_moment_fails_no_push(
    press: Press, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:

        def unreadable(path: str, content: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        broken.setattr(push, "CommitOperationAdd", unreadable)
        job = press.publish()
    assert (job.state, problem_type(job)) == (JobState.PUBLISHING, "urn:quarry:write-failed")
    assert press.publish().state is JobState.COMPLETED


def test_a_job_waits_for_a_person_after_as_many_attempts_as_are_allowed_without_a_new_commit(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three attempts are allowed, and the files take two commits.

    1. Two fail. 2. The third makes the first commit, and two more may fail. 3. With the next the job is
    blocked. 4. Resumed, it has all its attempts.
    """
    monkeypatch.setattr(push, "MAX_COMMIT_FILES", 2 * UNITS)
    press = Press(tmp_path, hub)
    hub.fail("commit", UNAVAILABLE)
    for _ in range(ATTEMPTS - 1):
        assert press.publish().state is JobState.PUBLISHING
    hub.heal()
    hub.fail("commit", Fault(status=503, nth=2, times=10_000))
    for _ in range(ATTEMPTS - 1):
        assert press.publish().state is JobState.PUBLISHING
    assert len(hub.repo(REPO).commits) == 2
    job = press.publish()
    assert (job.state, problem_type(job)) == (JobState.BLOCKED, "urn:quarry:hub-unavailable")
    press.store.write(jobs.resume, JOB)
    assert plans.lease(press.store, OWNER, 60.0) is None
    assert press.publish().state is JobState.PUBLISHING
    hub.heal()
    assert press.publish().state is JobState.COMPLETED
    press.store.close()


def test_a_rate_limit_is_a_wait_until_its_end_and_never_an_attempt(press: Press, hub: FakeHub) -> None:
    """1. The Hub says more often than there are attempts to come back in an hour. 2. It takes the job."""
    hub.fail("commit", Fault(status=429, headers={"RateLimit": '"commits";r=0;t=3599'}, times=2 * ATTEMPTS))
    for _ in range(2 * ATTEMPTS):
        job = press.publish()
        assert (job.state, problem_type(job)) == (JobState.PUBLISHING, "urn:quarry:hub-limited")
        press.clock.advance(HOUR_S - 1)
        assert publishing.lease(press.store, OWNER, 60.0) is None, "the Hub is not asked before"
    assert hub.calls["commit"] == 2 * ATTEMPTS
    assert press.publish().state is JobState.COMPLETED


def test_an_attempt_may_take_as_long_as_its_upload_does(press: Press, hub: FakeHub) -> None:
    hub.meanwhile("preupload", lambda: press.clock.advance(100 * HOUR_S))
    hub.fail("commit", UNAVAILABLE)
    assert press.publish().state is JobState.PUBLISHING


@pytest.mark.parametrize("error", [StoreUnavailable("away"), DiskFull("full")], ids=["away", "full"])
def test_a_push_goes_on_while_the_store_cannot_be_told_how_far_it_is(
    press: Press, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, error: QuarryError
) -> None:
    monkeypatch.setattr(push, "MAX_COMMIT_FILES", 2 * UNITS)

    def away(*_: object) -> None:
        raise error

    monkeypatch.setattr(publishing, "advance", away)
    job = press.publish()
    assert (job.state, job.problem) == (JobState.COMPLETED, None)
    assert len(hub.repo(REPO).commits) == 3


def test_every_group_of_files_has_tries_of_its_own(press: Press, hub: FakeHub) -> None:
    """Each of three groups is refused twice before it is taken; three tries are allowed."""
    for first_try in (1, 4, 7):
        hub.fail("preupload", Fault(status=CONFLICT, nth=first_try, times=2))
    assert press.publish().state is JobState.COMPLETED
    assert hub.repo(REPO).head.title == f"Add {JOB}"


def test_an_upload_and_a_commit_that_took_longer_than_the_deadline_of_a_call_are_tried_again(
    press: Press, hub: FakeHub
) -> None:
    hub.fail("preupload", Fault(status=CONFLICT))
    hub.fail("commit", Fault(status=CONFLICT))
    outlasted = Patience(
        attempts=3, first_wait_s=0.0, longest_wait_s=0.0, deadline_s=1e-9, sleep=lambda _: None
    )
    assert press.publish(patience=outlasted).state is JobState.COMPLETED


@pytest.mark.parametrize(
    ("number", "state", "kind"),
    [
        (errno.ENOSPC, JobState.BLOCKED, "urn:quarry:disk-full"),
        (errno.EDQUOT, JobState.BLOCKED, "urn:quarry:disk-full"),
        (errno.EIO, JobState.PUBLISHING, "urn:quarry:write-failed"),
    ],
)
def test_a_disk_error_of_landing_keeps_the_job(
    press: Press, monkeypatch: pytest.MonkeyPatch, number: int, state: JobState, kind: str
) -> None:
    """1. The folder of a landing file cannot be made. 2. The job waits. 3. It can be made."""
    make = Path.mkdir

    def refuse(path: Path, *given: object, **named: object) -> None:
        if path.is_relative_to(press.settings.dataset_dir(JOB)):
            raise OSError(number, "planted")
        make(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        job = press.publish()
    assert (job.state, problem_type(job)) == (state, kind)
    if state is JobState.BLOCKED:
        press.store.write(jobs.resume, JOB)
        assert plans.lease(press.store, OWNER, 60.0) is None
    assert press.publish().state is JobState.COMPLETED
