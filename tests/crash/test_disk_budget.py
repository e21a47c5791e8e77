"""A job ten times as large as the disk that it may take, while every process is killed.

Shards go when the repository has them. Its own bytes are all that a data folder's budget is held against: the
database is left out, which has the plan and no states.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from schemas.job import JobState
from schemas.names import manifest_path
from service.publish.assemble import intact_manifest
from service.store import Store, Transaction, jobs, migration
from tests.crash.conftest import MODE
from tests.crash.oracle import service
from tests.crash.processes import disturb, services
from tests.support.desk import REPO, TOKEN, etags
from tests.support.fake_hub import FakeHub
from tests.support.hub_client import Mode
from tests.support.hub_state import Token
from tests.support.hub_storage import XetStorage
from tests.support.jobs import request
from tests.support.tiny_model import random_target

HIDDEN, LAYERS = 2048, (0, 1, 2)
BYTES_PER_TOKEN = HIDDEN * len(LAYERS) * 2
UNITS_AT_ONCE = 6
"""In the engine and in proof: what may be there beside the budget."""
LOOK_S = 0.02


@dataclass(frozen=True)
class Size:
    """A job's figures."""

    engine: str
    samples: int
    tokens: int
    shard_bytes: int
    kills: int

    @property
    def job_bytes(self) -> int:
        return self.samples * self.tokens * BYTES_PER_TOKEN

    @property
    def budget(self) -> int:
        return self.job_bytes // 10

    @property
    def apart(self) -> int:
        """Units captured, or stored, between two kills, so that they fall all over the job."""
        return self.job_bytes // self.shard_bytes // self.kills


SIZES = {
    # On the tests' clock of uploads, and on the service's own: at most one commit in half a minute.
    "sample": Size("tests.support.brisk_engine:BriskEngine", 510, 32, 2**20, kills=8),
    "all": Size("tests.support.fake_engine:FakeEngine", 1700, 480, 2**25, kills=50),
}


class Meter:
    """The most bytes that a folder's files took on the disk while the meter was open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.peak_bytes = 0

    @contextmanager
    def open(self) -> Iterator["Meter"]:
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(LOOK_S):
                self.peak_bytes = max(self.peak_bytes, self._taken())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()

    def _taken(self) -> int:
        num_bytes = 0
        for parent, _, names in os.walk(self._folder):
            for name in names:
                if not name.startswith("quarry.db"):
                    with suppress(FileNotFoundError):  # it moves, or goes, while we look
                        num_bytes += Path(parent, name).stat().st_blocks * 512
        return num_bytes


def steps(tx: Transaction, job_id: str) -> int:
    """Return what was captured and stored, once all is planned: else each kill would begin the plan anew."""
    progress = jobs.job(tx, job_id).progress
    return progress.units_done + progress.units_stored if progress.plan_done else 0


def body_of(target: Path, size: Size) -> dict[str, Any]:
    """Return the body of the job: rows of one length, each of other tokens."""
    rows = [
        [20 + n % 40, 20 + n // 40, *(20 + (n + t) % 997 for t in range(2, size.tokens))]
        for n in range(size.samples)
    ]
    samples = [{"id": str(n), "token_ids": row} for n, row in enumerate(rows)]
    storage = {"shard_bytes": size.shard_bytes, "keep_local": False}
    body = request(target, samples, layers=LAYERS, storage=storage, loss="all", hub={"repo_id": REPO})
    return body.model_dump(mode="json")


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["lfs", "xet"])
def test_kills_of_every_process_leave_a_disk_of_a_tenth_of_the_job_inside_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str], mode: Mode
) -> None:
    size = SIZES["all" if MODE == "all" else "sample"]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1" if mode == "lfs" else "0")
    target = random_target(tmp_path / "models" / "target", layers=2, hidden=HIDDEN, max_position=512)
    with FakeHub(cas=XetStorage() if mode == "xet" else None) as hub:
        hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        hub.lfs.keeps_bytes = False
        of_hub = {"hub_endpoint": hub.url, "hub_token": TOKEN}
        bounds = {"engine": size.engine, "scratch_bytes": size.budget, "pool_bytes": 2**26}
        settings = service(tmp_path / "data", target, unit_attempts=100, **bounds, **of_hub)
        settings.data_dir.mkdir()
        store = Store(settings.database())
        store.write(migration.migrate)
        with services(settings, 1) as made, Meter(settings.data_dir).open() as meter:
            body = body_of(target, size)
            job_id = disturb(made, store, body, {}, size.kills, None, tally, steps, size.apart)
        job = store.read(jobs.job, job_id)
        store.close()
    assert job.state is JobState.COMPLETED, job.problem
    assert job.progress.bytes_written > size.job_bytes
    print(f"{mode}: {job.progress.bytes_written} bytes, {size.budget} may wait, peak {meter.peak_bytes}")
    assert meter.peak_bytes <= size.budget + UNITS_AT_ONCE * size.shard_bytes
    # The indexes, the manifest and the card are kept here; the repository has the same files.
    dataset = settings.dataset_dir(job_id)
    there = {path: blob.etag for path, blob in hub.repo(REPO).head.tree.items()}
    assert etags(dataset).items() <= there.items()
    manifest = intact_manifest(dataset / manifest_path(job_id))
    named = {shard.path: shard.sha256 for shard in manifest.shards}
    assert {path: etag for path, etag in there.items() if path.startswith("data/")} == named
    ids = [row for path in dataset.rglob("index/*/*") for row in pq.read_table(path)["source_id"].to_pylist()]
    assert Counter(ids) == Counter(str(n) for n in range(size.samples))
