"""Databases of every earlier version, with jobs in flight: they migrate, and no row is lost or doubled."""

from pathlib import Path

import pytest

from schemas.names import job_id_from_key
from service.store import jobs
from tests.frozen.databases import (
    FOLDER,
    MIGRATIONS,
    STATES,
    WRITTEN,
    assert_every_row_once,
    copy_data,
    load,
    opened,
    work,
)
from tests.support.desk import REPO
from tests.support.fake_hub import FakeHub
from tests.support.jobs import Shop
from tests.support.roles import sweep


@pytest.mark.parametrize("revision", MIGRATIONS)
def test_jobs_in_flight_of_an_older_version_end_with_every_row_once(
    revision: str, url: str, hub: FakeHub, tmp_path: Path
) -> None:
    """1. A database of an older version, and its data folder.

    2. Today's service migrates, sweeps, resumes what was blocked, and works until nothing is left. 3. Every
    job is completed, each row once, what was to be pushed is in its repository, and no work folder is left.
    """
    load(revision, url)
    copy_data(tmp_path)
    with opened(tmp_path, url, hub) as shop:
        found = [shop.store.read(jobs.job, job_id_from_key(name)) for name in STATES]
        assert {job.idempotency_key: job.state for job in found} == STATES
        listed = {job.id: (job.model, job.source_kind) for job in shop.store.read(jobs.page)[0]}
        assert listed == {job.id: ("./target", "inline") for job in found}
        assert jobs_swept(shop) == {job_id_from_key("blocked"), job_id_from_key("completed")}
        shop.store.write(jobs.resume, job_id_from_key("blocked"))
        work(shop)
        for name in STATES:
            assert_every_row_once(shop, name)
        assert jobs_swept(shop) == {job.id for job in found} - {job_id_from_key("completed")}
    job_id = job_id_from_key("publishing")
    pushed = {path for path in hub.repo(REPO).head.tree if path.startswith("data/")}
    assert pushed == {f"data/{job_id}/train-{unit:05d}.parquet" for unit in range(3)}


def jobs_swept(shop: Shop) -> set[str]:
    root = shop.settings.work_root
    return {path.relative_to(root).parts[0] for path in sweep(shop.store, shop.settings)}


def test_every_migration_has_its_database() -> None:
    """Add a dump by `make_databases`, with the last code before the migration that you write."""
    kinds = ("sqlite", "postgresql")
    assert {path.name for path in FOLDER.glob("*.sql")} == {
        f"{one}-{kind}.sql" for one in WRITTEN for kind in kinds
    }
    assert WRITTEN[-1] >= MIGRATIONS[-2]
