"""A bug in a unit's proof or in a writer thread is told in the job: nothing waits for ever for a result."""

from pathlib import Path
from typing import Any

import pytest

from connector.shards import UnitWriter
from schemas.job import JobState
from service.capture import unit_run
from service.proof.verify import verify_dataset
from service.store import jobs, units
from tests.support.jobs import Shop, conversations, request

SAMPLES = conversations(20)


def test_a_bug_in_the_proof_of_a_unit_fails_the_job_with_a_word_and_the_capture_ends(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buggy(**given: Any) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(unit_run, "check_unit", buggy)
    job = shop.run(request(target, SAMPLES))
    assert job.state is JobState.FAILED and job.problem is not None
    assert (job.problem.title, job.problem.status) == ("Internal error", 500)
    assert job.problem.detail == "internal error: RuntimeError('nobody foresaw this')"


@pytest.mark.parametrize("step", ["encode", "append"])
def test_a_unit_that_meets_a_bug_in_a_writer_thread_runs_again_and_costs_no_sample(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """1. A step of one row raises what is no error of the file system. 2. Its unit is tried again, no other.

    3. The job completes.
    """
    healthy, bugs = getattr(UnitWriter, step), iter(["nobody foresaw this"])
    hit: list[int] = []

    def failing(self: UnitWriter, *given: Any) -> Any:
        if bug := next(bugs, None):
            hit.append(self.attempt_id.unit)
            raise KeyError(bug)
        return healthy(self, *given)

    monkeypatch.setattr(UnitWriter, step, failing)
    job = shop.run(request(target, SAMPLES))
    assert job.state is JobState.COMPLETED, job.problem
    rows = shop.store.read(units.of_job, job.id)
    assert len(rows) > 1 and len(hit) == 1
    # A lease that is given back unread, as a sick worker does with a unit's, takes an epoch too: 2 or more.
    assert [row.unit for row in rows if row.epoch > 1] == hit
    (told,) = [event.problem for event in shop.store.read(jobs.events, job.id) if event.problem is not None]
    assert told.type == "urn:quarry:engine-died" and "KeyError('nobody foresaw this')" in told.detail
    assert sorted(row["source_id"] for row in shop.rows(job.id)) == sorted(one["id"] for one in SAMPLES)
    report = verify_dataset(shop.settings.dataset_dir(job.id))
    assert report.ok, report.findings
