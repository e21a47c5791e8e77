"""Posted samples that a job takes over from an earlier run: they are on the disk before that run lets go."""

from pathlib import Path

import pytest

from schemas.names import job_id_from_content, passed_on_path, posted_path
from service.plan import posted
from service.settings import Settings

RUN, JOB = job_id_from_content("run"), job_id_from_content("job")


def test_a_copy_is_durable_before_the_earlier_run_no_longer_passes_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the move would leave it with a run that removes it when it completes."""
    settings = Settings(data_dir=tmp_path)
    given, taken = (settings.work_root / posted_path(job) for job in (RUN, JOB))
    for folder in (given, taken):
        folder.mkdir(parents=True)
    (given / "a.jsonl").write_text("{}\n")
    durable, is_passed_on = set[str](), []

    def fsync(path: Path) -> None:
        if path == taken:
            durable.update(file.name for file in path.iterdir())
            is_passed_on.append(not any(given.iterdir()))

    monkeypatch.setattr(posted, "fsync", fsync)
    posted.take(settings, 1, JOB, {RUN: True}, lambda: None)
    assert durable == {"a.jsonl"}
    assert is_passed_on[0] is False
    assert (settings.work_root / passed_on_path(RUN) / "a.jsonl").exists()
