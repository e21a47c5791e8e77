"""A disk that is smaller than the dataset: capture waits for uploads, and goes on as shards leave."""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from schemas.job import JobState
from service.capture.attempt_files import remove_paths
from service.control.submit import check_scratch
from service.errors import OptionRefused
from service.proof.verify import Reading, verify_dataset
from service.settings import Settings
from service.store import commits, consumers, jobs, storing
from service.store.jobs import STARTS
from tests.support.desk import REPO, TOKEN, etags, writable_hub
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture, run_storing

BUDGET, SHARD_BYTES, IN_FLIGHT = 2**20, 65_536, 2
NUM_SAMPLES = 60
SMALL_DISK = {"scratch_bytes": BUDGET, "units_in_flight": IN_FLIGHT, "units_in_proof": 1, "lease_s": 3.0}


def shard_bytes_in(folder: Path) -> int:
    """What is on disk now, while files move."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.startswith("train-") and "/index/" not in f"{parent}/":
                with suppress(FileNotFoundError):
                    num_bytes += Path(parent, name).stat().st_size
    return num_bytes


@pytest.mark.slow
def test_capture_stays_inside_its_disk_and_goes_on_when_shards_have_left(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Nobody uploads: capture waits, and the job says for what. 2. Somebody does: it goes on."""
    monkeypatch.setattr(storing, "APART", timedelta(0))
    with writable_hub(tmp_path, monkeypatch) as hub:
        shop = Shop.open(tmp_path, target, hub_endpoint=hub.url, hub_token=TOKEN, **SMALL_DISK)
        samples = conversations(NUM_SAMPLES, longest=40)
        storage = {"shard_bytes": SHARD_BYTES, "keep_local": False}
        job_id = shop.submit(request(target, samples, layers=(1, 2), storage=storage, hub={"repo_id": REPO}))
        shop.plan()
        planned = shop.store.read(jobs.job, job_id)
        assert planned.identity is not None
        num_bytes = planned.progress.tokens_planned * planned.identity.state_bytes_per_token
        assert num_bytes > 1.5 * BUDGET, num_bytes
        ended = threading.Event()
        try:
            empty = partial(upload, shop, ended)
            peak, _ = asyncio.run(capture_in_a_full_disk(shop, job_id, ended, empty))
        finally:
            ended.set()
        assert peak <= BUDGET + (IN_FLIGHT + 1) * 2 * SHARD_BYTES
        shop.publish()
        job = shop.store.read(jobs.job, job_id)
        assert job.state is JobState.COMPLETED, job.problem
        assert job.progress.samples_written == NUM_SAMPLES
        assert shard_bytes_in(shop.settings.data_dir) == 0
        there = {path: blob.etag for path, blob in hub.repo(REPO).head.tree.items()}
        assert etags(shop.settings.dataset_dir(job_id)).items() <= there.items()
        assert sum(path.startswith("data/") for path in there) == job.progress.units_done
        shop.store.close()


@pytest.mark.slow
def test_capture_goes_on_as_all_consumers_have_what_there_is(tmp_path: Path, target: Path) -> None:
    """1. Nobody consumes: capture waits, and the job says for whom. 2. Two do: it goes on."""
    shop = Shop.open(tmp_path, target, **SMALL_DISK)
    samples = conversations(NUM_SAMPLES, longest=40)
    storage = {"shard_bytes": SHARD_BYTES, "retention": "consumed"}
    job_id = shop.submit(request(target, samples, layers=(1, 2), storage=storage))
    shop.plan()
    rows: dict[str, list[str]] = {"one": [], "two": []}
    for name in ("gone", *rows):
        shop.store.write(consumers.acknowledge, job_id, name, -1, None)
    ended = threading.Event()
    try:
        consume = partial(consumed, shop, job_id, rows, ended)
        peak, waits = asyncio.run(capture_in_a_full_disk(shop, job_id, ended, consume))
    finally:
        ended.set()
    assert "consumer gone was last heard of at" in waits
    assert peak <= BUDGET + (IN_FLIGHT + 1) * 2 * SHARD_BYTES
    shop.publish()
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    everything = sorted(sample["id"] for sample in samples)
    assert all(sorted(ids) == everything for ids in rows.values())
    assert shard_bytes_in(shop.settings.data_dir) == 0
    report = verify_dataset(shop.settings.dataset_dir(job_id))
    assert report.ok, report
    assert report.consumed_shards == job.progress.units_done
    shop.store.close()


def test_a_shard_that_is_consumed_while_the_dataset_is_verified_is_not_missed(
    shop: Shop, target: Path
) -> None:
    """Of a dataset that keeps its shards it is."""
    body = partial(request, target, conversations(6))
    kept = shop.submit(body(), "kept")
    consumed = shop.submit(body(storage={"retention": "consumed"}), "consumed")
    for job_id in (kept, consumed):
        shop.plan()
        shop.capture(job_id)
        shop.publish()
        dataset = shop.settings.dataset_dir(job_id)

        def take(path: str | None, dataset: Path = dataset) -> None:
            if path is not None and path.startswith("data/"):
                (dataset / path).unlink(missing_ok=True)

        report = verify_dataset(dataset, reading=Reading(take))
        assert report.ok == (job_id == consumed)
        assert report.consumed_shards == (1 if job_id == consumed else 0)


def consumed(shop: Shop, job_id: str, rows: dict[str, list[str]], ended: threading.Event) -> None:
    """Remove the consumer that is gone; read every unit for each of the others until there are no more."""
    folder, after = shop.settings.dataset_dir(job_id), dict.fromkeys(rows, -1)
    remove_paths(shop.settings, job_id, shop.store.write(consumers.remove, job_id, "gone"))
    idle = 0
    while not ended.is_set() or idle < len(rows):
        for name in rows:
            page = shop.store.read(commits.readable, job_id, after=after[name], limit=1)
            idle = 0 if page.units else idle + 1
            if not page.units or not all((folder / entry.path).is_file() for entry in page.units[0].shards):
                continue  # it is committed, and on its way into the folder
            for entry in page.units[0].shards:
                column = pq.read_table(folder / entry.path, columns=["source_id"])["source_id"]
                rows[name] += column.to_pylist()
            after[name] = page.next_after
            acknowledged = consumers.acknowledge, job_id, name, page.next_after, None
            remove_paths(shop.settings, job_id, shop.store.write(*acknowledged))


async def capture_in_a_full_disk(
    shop: Shop, job_id: str, ended: threading.Event, empty: Callable[[], None]
) -> tuple[int, str]:
    """Capture to the end, and `empty` the disk from when the job says that it waits.

    Return the most bytes on disk, and for what it waited.
    """
    peak = 0
    capture = Capture(shop.store, shop.settings, "worker", only_job=job_id)
    running = asyncio.create_task(capture.run())
    waits: str | None = None
    emptying = None
    while not running.done():
        await asyncio.sleep(0.02)
        if emptying is not None and emptying.done():
            emptying.result()
        peak = max(peak, shard_bytes_in(shop.settings.data_dir))
        row = shop.store.read(jobs.job, job_id)
        if waits is None and row.waits not in (None, STARTS):
            waits = row.waits
            assert row.progress.units_stored == 0 < row.progress.units_done < row.progress.units_planned
            emptying = asyncio.create_task(asyncio.to_thread(empty))
    await running
    ended.set()
    assert waits is not None and "units to upload" in waits
    assert emptying is not None
    await emptying
    return peak, waits


def upload(shop: Shop, ended: threading.Event) -> None:
    while not ended.wait(0.05):
        run_storing(shop.store, shop.settings, "storer", ended.is_set)


def test_shards_of_which_those_in_flight_fill_the_disk_are_refused(tmp_path: Path, target: Path) -> None:
    settings = Settings(data_dir=tmp_path, scratch_bytes=2**22, units_in_flight=2, units_in_proof=2)
    storage = {"shard_bytes": 2**20, "keep_local": False}
    body = request(target, [{"text": "a"}], storage=storage, hub={"repo_id": REPO})
    check_scratch(body, settings)
    too_large = body.storage.model_copy(update={"shard_bytes": 2**20 + 1})
    with pytest.raises(OptionRefused) as refused:
        check_scratch(body.model_copy(update={"storage": too_large}), settings)
    assert refused.value.field == "storage.shard_bytes" and str(2**20) in str(refused.value.cure)


def test_shards_leave_for_a_repository_only(target: Path) -> None:
    with pytest.raises(ValueError, match="goes with 'hub'"):
        request(target, [{"text": "a"}], storage={"keep_local": False})
