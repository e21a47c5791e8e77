"""A disk that is full at any file that the service writes blocks the job, which resumes whole."""

from pathlib import Path

import pytest

from schemas.dataset import seal
from schemas.dataset.seal import temporary
from schemas.job import JobState
from schemas.names import PLAN_FILE, attempt_dir, job_id_from_content, manifest_path, shard_file
from service.capture.attempt_files import INDEX_FILE
from service.proof.verify import verify_dataset
from service.store import jobs
from tests.support.jobs import Shop, conversations, request

JOB = job_id_from_content("a job")
SAMPLES = conversations(20)
ATTEMPT = attempt_dir(JOB, 0, 1)
FILES: dict[str, Path] = {
    "plan": Path(ATTEMPT, PLAN_FILE),
    "shard": temporary(Path(ATTEMPT, shard_file(0))),
    "index": temporary(Path(ATTEMPT, INDEX_FILE)),
}


@pytest.mark.parametrize("file", FILES)
def test_a_full_disk_blocks_the_job_and_it_resumes_whole(shop: Shop, target: Path, file: str) -> None:
    """1. The file is written to a device that is always full. 2. The job is blocked, and the file is removed.

    3. With room it resumes and completes.
    """
    device = shop.settings.work_root / FILES[file]
    device.parent.mkdir(parents=True)
    device.symlink_to("/dev/full")
    assert_blocked_and_resumed(shop, target, device)


def test_a_full_disk_at_the_manifest_blocks_the_job_and_it_resumes_whole(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there before a publisher begins, the publisher removes: the device comes when it has begun."""
    final = shop.settings.dataset_dir(JOB) / manifest_path(JOB)
    device = temporary(final, "1")

    def full(path: Path, attempt: str = "") -> Path:
        if path == final and not device.exists() and attempt == "1":
            device.symlink_to("/dev/full")
        return temporary(path, attempt)

    monkeypatch.setattr(seal, "temporary", full)
    assert_blocked_and_resumed(shop, target, device)


def assert_blocked_and_resumed(shop: Shop, target: Path, device: Path) -> None:
    blocked = shop.run(request(target, SAMPLES))
    assert blocked.state is JobState.BLOCKED
    assert blocked.problem is not None and blocked.problem.type == "urn:quarry:disk-full"
    assert blocked.problem.cure
    assert not device.is_symlink()
    shop.store.write(jobs.resume, JOB)
    job = shop.finish(JOB)
    assert job.state is JobState.COMPLETED, job.problem
    assert sorted(row["source_id"] for row in shop.rows(JOB)) == sorted(one["id"] for one in SAMPLES)
    report = verify_dataset(shop.settings.dataset_dir(JOB))
    assert report.ok, report.findings
