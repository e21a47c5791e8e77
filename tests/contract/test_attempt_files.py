"""Landing twice at the same time: by the worker that committed a unit, and by the publisher of its job."""

from pathlib import Path

import pytest

from schemas.dataset import seal
from schemas.dataset.seal import move_durably
from schemas.job import JobState
from service.capture import loop
from service.capture.attempt_files import land, land_unit, remove_paths
from service.settings import Settings
from service.store import Store, UnitCommit, commits, consumers, jobs
from tests.support.jobs import Shop, conversations, request


def test_a_unit_is_landed_by_two_at_once(shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A unit is committed. 2. A publisher is about to move its file. 3. The worker moves it first."""
    job_id = shop.submit(request(target, conversations(10)))
    shop.plan()
    with monkeypatch.context() as unlanded:
        unlanded.setattr(loop, "land_unit", lambda store, settings, commit: None)
        shop.capture(job_id)
    dataset, replace = shop.settings.dataset_dir(job_id), Path.replace
    overtaken: list[Path] = []

    def replacing(source: Path, final: Path) -> Path:
        if final.is_relative_to(dataset / "data") and not overtaken:
            overtaken.append(final)
            land(shop.store, shop.settings, shop.store.read(commits.unit_commits, job_id))
        return replace(source, final)

    monkeypatch.setattr(Path, "replace", replacing)
    shop.publish()
    assert shop.store.read(jobs.job, job_id).state is JobState.COMPLETED
    assert len(overtaken) == 1
    assert len(shop.rows(job_id)) == 10


def test_a_unit_that_is_consumed_before_its_worker_moves_it_is_no_loss(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A sweep lands it. 2. Its consumer has it, and its shards go. 3. The worker finds nothing to move."""
    storage = {"shard_bytes": 65_536, "retention": "consumed"}
    job_id = shop.submit(request(target, conversations(10), storage=storage))
    shop.plan()

    def overtaken(store: Store, settings: Settings, commit: UnitCommit) -> None:
        land(store, settings, store.read(commits.unit_commits, job_id))
        last = store.read(commits.readable, job_id, after=-1, limit=100).next_after
        remove_paths(settings, job_id, store.write(consumers.acknowledge, job_id, "one", last, None))
        land_unit(store, settings, commit)

    monkeypatch.setattr(loop, "land_unit", overtaken)
    shop.capture(job_id)
    progress = shop.store.read(jobs.job, job_id).progress
    assert progress.bytes_gone == progress.bytes_written > 0
    assert "restore the data folder" not in caplog.text


def test_what_another_moved_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has removed the folder as well."""
    source, final = tmp_path / "attempt" / "shard", tmp_path / "data" / "shard"
    final.parent.mkdir()
    final.write_bytes(b"rows")
    synced: list[Path] = []
    fsync = seal.fsync

    def syncing(folder: Path) -> None:
        fsync(folder)
        synced.append(folder)

    monkeypatch.setattr(seal, "fsync", syncing)
    move_durably(source, final)
    assert synced == [tmp_path, final.parent]


def test_a_file_in_neither_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "attempt").mkdir()
    with pytest.raises(FileNotFoundError):
        move_durably(tmp_path / "attempt" / "shard", tmp_path / "data" / "shard")
    assert not (tmp_path / "data").exists(), "as of a dataset that was deleted"
