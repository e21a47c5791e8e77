"""An uploader that was given up commits late: no reader of the dataset sees a file of it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from schemas.job import JobState
from schemas.names import index_path, manifest_path, shard_path
from schemas.request import HubTarget
from service.artifacts.repository import Patience
from service.errors import StoreUnavailable
from service.host import HOST_FILE
from service.settings import Settings
from service.store import Store, Transaction, hosts, jobs, migration, storing
from tests.support import finished_job
from tests.support.desk import REPO, TOKEN, etags, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import JOB, OWNER, a_request, capture_unit
from tests.support.roles import run_publishing, run_storing
from tests.support.store_cases import Clock

UNITS, ROWS = 3, 3
PATIENCE = Patience(attempts=4, sleep=lambda _: None)


class Severed(Store):
    """A database that one host cannot reach while it `is_cut`."""

    def __init__(self, url: str, clock: str) -> None:
        super().__init__(url, clock)
        self.is_cut = threading.Event()
        self.missed = threading.Event()

    def writing(self) -> AbstractContextManager[Transaction]:
        if self.is_cut.is_set():
            self.missed.set()
            raise StoreUnavailable("no route to host")
        return super().writing()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(storing, "FULL_FILES", 2 * UNITS)
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


def capture_anew(store: Store, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture what was given up again, the first unit with other states."""
    layer_bytes = finished_job.layer_bytes

    def other_bytes(unit: int, row: int, layer_id: int, dtype: str = "bfloat16") -> bytes:
        same = layer_bytes(unit, row, layer_id, dtype)
        return same if unit else np.full(len(same), 1, np.uint8).tobytes()

    monkeypatch.setattr(finished_job, "layer_bytes", other_bytes)
    for _ in range(UNITS):
        capture_unit(store, dataset, ROWS)


@pytest.mark.parametrize("held", ["commit", "info"])
@pytest.mark.parametrize("is_published", [False, True], ids=["before", "after the publication"])
def test_a_commit_of_a_lost_lease_that_arrives_late_changes_nothing(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, is_published: bool, held: str
) -> None:
    """An uploader is cut off from the database and not from the Hub; its own clock notices nothing.

    1. Its commit, or its question for the head before that, is under way for long. 2. Its host is forgotten,
    what it held is captured again on another, which stores it and publishes the job. 3. It arrives, and the
    uploader tries again with what it has. 4. The uploader reaches the database.
    """
    clock = Clock(1_000_000_000.0)
    old, new = (
        Settings(data_dir=tmp_path / name, hub_endpoint=hub.url, hub_token=TOKEN, database_url=url, lease_s=4)
        for name in ("old", "new")
        for url in [f"sqlite:///{tmp_path / 'quarry.db'}"]
    )
    store, severed = (kind(old.database(), clock.of(old.database())) for kind in (Store, Severed))
    store.write(migration.migrate)
    request = a_request(HubTarget(repo_id=REPO))
    dataset = old.dataset_dir(JOB)
    finished_job.run_to_publishing(
        store, dataset, JOB, request, num_units=UNITS + 1, rows=ROWS, captured=UNITS
    )
    clock.advance(storing.APART.total_seconds() + 1)

    is_under_way, arrives = threading.Event(), threading.Event()

    def hold() -> None:
        is_under_way.set()
        assert arrives.wait(60)

    hub.meanwhile("preupload", lambda: hub.meanwhile(held, hold))
    with ThreadPoolExecutor(1) as beside:
        upload = beside.submit(run_storing, severed, old, "old", lambda: False, patience=PATIENCE)
        assert is_under_way.wait(60)
        severed.is_cut.set()
        assert store.write(hosts.forget, (old.data_dir / HOST_FILE).read_text()) == UNITS
        capture_anew(store, new.dataset_dir(JOB), monkeypatch)
        clock.advance(storing.APART.total_seconds() + 1)
        assert run_storing(store, new, "new", lambda: False, patience=PATIENCE)
        if is_published:
            capture_unit(store, new.dataset_dir(JOB), ROWS)
            assert run_publishing(store, new, OWNER, lambda: False)
            assert store.read(jobs.state, JOB) is JobState.COMPLETED
        head = hub.repo(REPO).head
        severed.missed.clear()
        arrives.set()
        assert severed.missed.wait(60), "it asks the database before it commits again"
        severed.is_cut.clear()
        assert upload.result(60)
    assert hub.repo(REPO).head is head
    here, there = etags(new.dataset_dir(JOB)), {path: blob.etag for path, blob in head.tree.items()}
    paths = [path for unit in range(UNITS) for path in (shard_path(JOB, unit), index_path(JOB, unit))]
    assert [there[path] for path in paths] == [here[path] for path in paths]
    assert (manifest_path(JOB) in there) == is_published
    assert there[shard_path(JOB, 0)] != etags(dataset)[shard_path(JOB, 0)]
    job = store.read(jobs.job, JOB)
    assert job.problem is None and job.progress.units_stored == (UNITS + 1 if is_published else UNITS)
    for opened in (store, severed):
        opened.close()
