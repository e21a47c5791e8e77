"""What a planner meets that nobody foresaw ends its job with a word; what is known is named with a cure."""

import errno
import logging
import os
from pathlib import Path

import pytest

from schemas.identity import Identity
from schemas.job import JobState
from service.errors import DiskFull, HubUnavailable, QuarryError, SourceRefused
from service.plan.hub_reading import reading_hub
from service.plan.target import inspect_target
from service.settings import Settings
from service.store import PlanLease, Transaction, jobs, plans
from tests.support.fake_hub import FakeHub
from tests.unit.plan.house import JOB, House


@pytest.mark.parametrize("said", ["nobody foresaw this", "\ud800 " + "x" * 10_000])
def test_a_bug_fails_the_job_with_a_word_and_the_planner_goes_on(
    house: House, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. planning raises what is no QuarryError  2. the job says so, the log has the traceback.

    3. without the bug the job is resumed, and planned by the same planner.
    """

    def buggy(tx: Transaction, lease: PlanLease, identity: Identity) -> None:
        raise KeyError(said)

    house.submit()
    with monkeypatch.context() as bug, caplog.at_level(logging.ERROR, "service.plan.planner"):
        bug.setattr(plans, "set_identity", buggy)
        assert house.plan() is True
    job = house.store.read(jobs.job, JOB)
    assert job.state is JobState.FAILED and job.problem is not None
    assert (job.problem.title, job.problem.status) == ("Internal error", 500)
    told = job.problem.detail
    assert told.startswith("internal error: KeyError(") and ascii(said)[:10] in told
    assert len(told) < 1000 and job.problem.cure
    [record] = [entry for entry in caplog.records if entry.exc_info]
    assert record.exc_info is not None and record.exc_info[0] is KeyError and JOB in record.getMessage()
    house.store.write(jobs.resume, JOB)
    assert house.plan() is True
    assert house.store.read(jobs.job, JOB).progress.plan_done


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/blob"), DiskFull),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), DiskFull),
        (OSError(errno.EIO, os.strerror(errno.EIO)), HubUnavailable),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), HubUnavailable),
        (OSError("the file's length is another"), HubUnavailable),
        (ConnectionResetError(), HubUnavailable),
        (FileNotFoundError("no data files"), SourceRefused),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), SourceRefused),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_what_breaks_while_the_hub_is_read_has_its_own_error(
    raised: Exception, expected: type[QuarryError]
) -> None:
    with (
        pytest.raises(QuarryError) as caught,
        reading_hub("dataset 'org/set'", SourceRefused, "source.repo_id", "check the id"),
    ):
        raise raised
    assert type(caught.value) is expected
    assert caught.value.field == "source.repo_id" and "dataset 'org/set'" in caught.value.detail
    if expected is not HubUnavailable:
        assert caught.value.cure
    assert "/cache" not in caught.value.detail


def test_a_cache_that_cannot_be_written_is_not_the_models_fault(
    house: House, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    hub.add_repo("org/model", {path.name: path.read_bytes() for path in house.model.iterdir()}, kind="model")
    house.submit(model="org/model")
    with pytest.raises(HubUnavailable) as caught:
        inspect_target(house.store.read(jobs.request, JOB), Settings(hub_endpoint=hub.url))
    assert caught.value.field == "model"
