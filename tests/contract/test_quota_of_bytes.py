"""A job may write more than was foreseen: its key's bytes are asked for at every unit."""

from pathlib import Path

from schemas.job import JobState
from schemas.keys import NewKey, Scope
from schemas.names import job_id_from_content
from service.store import NewJob, jobs, keys
from tests.support.jobs import Shop, conversations, request


def test_a_job_that_writes_more_than_its_key_may_is_blocked_and_goes_on_when_it_may(
    tmp_path: Path, target: Path
) -> None:
    """1. A key may have 300 kB  2. its job is blocked after a unit or two  3. it is so again when the key is
    revoked, with which nothing else has a limit  4. with more it completes.
    """
    shop = Shop.open(tmp_path, target, unit_max_samples=4)
    made = NewKey(
        name="team", scopes=(Scope.JOBS_WRITE,), max_bytes=300_000, model_roots=(str(target.parent),)
    )
    shop.store.write(keys.add, "k1", "0" * 64, made)
    body = request(target, conversations(40))
    job_id = job_id_from_content("team's")
    shop.store.write(jobs.submit, NewJob.of(job_id, "team's", body, owner="team"))
    job = shop.finish(job_id)
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.type == "urn:quarry:quota-exceeded" and "max_bytes" in job.problem.detail
    assert 1 < job.progress.units_done < job.progress.units_planned
    assert job.progress.bytes_written < 600_000, "at most a unit more"
    shop.store.write(keys.revoke, "k1")
    shop.store.write(jobs.resume, job_id)
    again = shop.finish(job_id)
    assert (again.state, again.progress.units_done) == (JobState.BLOCKED, job.progress.units_done)
    shop.store.write(keys.add, "k2", "1" * 64, made.model_copy(update={"max_bytes": 10**9}))
    shop.store.write(jobs.resume, job_id)
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert len(shop.rows(job_id)) == 40
    shop.store.close()
