"""The frozen databases: loaded as an operator would have them, beside their data folder."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import torch
from alembic import command
from alembic.config import Config
from sqlalchemy import make_url

import service.migrations
from schemas.job import JobState
from schemas.names import job_id_from_key
from service.proof.verify import verify_dataset
from service.store import Store, commits, jobs
from tests.frozen.values import HERE
from tests.support.desk import TOKEN
from tests.support.fake_engine import states_TH
from tests.support.fake_hub import FakeHub
from tests.support.jobs import Shop

FOLDER = Path(__file__).with_name("databases")
MIGRATIONS = sorted(path.name[:4] for path in Path(service.migrations.__file__).parent.glob("versions/0*.py"))
WRITTEN = ("0001", "0004", "0007", "0008")
"""Versions that were the newest of their code, so that it wrote a dump of each."""
STATES = {
    "queued": JobState.QUEUED,
    "planning": JobState.RUNNING,
    "planned": JobState.RUNNING,
    "leased": JobState.RUNNING,
    "publishing": JobState.PUBLISHING,
    "blocked": JobState.BLOCKED,
    "completed": JobState.COMPLETED,
}
ROWS = ("a", "b", "c", "d", "e")
LAYERS = (1, 2, 3, 4)


def load(revision: str, url: str) -> None:
    """Load a database of `revision` into the empty one at `url`."""
    written = max(one for one in WRITTEN if one <= revision)
    parsed = make_url(url)
    dump = (FOLDER / f"{written}-{parsed.get_backend_name()}.sql").read_text()
    if parsed.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(str(parsed.database))) as connection:
            connection.executescript(dump)
    else:
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(dump)
    if written != revision:
        _upgrade(url, revision)


def _upgrade(url: str, revision: str) -> None:
    database = Store(url)
    with database.writing() as tx:
        config = Config()
        config.set_main_option("script_location", str(Path(service.migrations.__file__).parent))
        config.attributes["connection"] = tx.connection
        command.upgrade(config, revision)
    database.close()


def copy_data(folder: Path) -> Path:
    """Copy the data folder that belongs to every database to `folder`."""
    return Path(shutil.copytree(FOLDER / "data", folder / "data"))


@contextmanager
def opened(folder: Path, url: str, hub: FakeHub) -> Iterator[Shop]:
    """Open today's service on an old database and its data folder; it migrates."""
    more = {"unit_max_samples": 2, "hub_endpoint": hub.url, "hub_token": TOKEN}
    shop = Shop.open(folder, HERE / "target", database_url=url, **more)
    yield shop
    shop.store.close()


def work(shop: Shop) -> None:
    """Plan, capture and publish until nothing is left."""
    shop.plan()
    for job_id in map(job_id_from_key, STATES):
        if shop.store.read(jobs.state, job_id) is JobState.RUNNING:
            shop.capture(job_id)
    shop.publish()


def assert_every_row_once(shop: Shop, name: str) -> None:
    """Every sample is written once, with the engine's states, or rejected; `quarry verify` is content."""
    job = shop.store.read(jobs.job, job_id_from_key(name))
    assert job.state is JobState.COMPLETED, job.problem
    rows = shop.rows(job.id)
    assert sorted(row["source_id"] for row in rows) == [f"{name} {row}" for row in ROWS]
    for row in rows:
        for k in LAYERS:
            truth = states_TH(row["input_ids"], k, 64, "bfloat16").view(torch.uint8).numpy().tobytes()
            assert row[f"layer_{k}"] == truth
    assert [reject.source_id for reject in shop.store.read(commits.rejects, job.id)] == [f"{name} empty"]
    assert (job.progress.samples_planned, job.progress.samples_written) == (6, 5)
    report = verify_dataset(shop.settings.dataset_dir(job.id))
    assert report.ok, report.findings
    assert report.rows == len(ROWS)
