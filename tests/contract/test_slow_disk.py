"""A disk that is slower than the engine delays a job, and nothing is taken for lost meanwhile."""

import asyncio
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from schemas.dataset.framing import Page, ShardFile
from schemas.job import JobState
from schemas.worker import Role
from service.capture import receipt_errors
from service.capture.link import Receipt
from service.errors import EngineStuck
from service.settings import Settings
from service.store import Store, migration, workers
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids
from tests.support.roles import Capture
from tests.support.waiting import until
from tests.unit.capture.test_link import LOAD

ROWS, ROW_TOKENS, ROW_S = 30, 200, 0.4
TIMEOUT_S = 4.0
"""The disk takes three times as long for the unit, and a fraction of it for what the pool holds."""


def test_rows_that_wait_for_a_slow_disk_are_not_taken_for_lost(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine answers a unit's rows at once; they wait in its cache, since the pool has room for two."""
    write = ShardFile.write_row

    def slowly(self: ShardFile, row: Iterable[Page]) -> None:
        time.sleep(ROW_S)
        write(self, row)

    monkeypatch.setattr(ShardFile, "write_row", slowly)
    rows = random_ids([ROW_TOKENS] * ROWS, vocab_size=12)
    samples = [{"id": str(row), "token_ids": ids} for row, ids in enumerate(rows)]
    shop = Shop.open(tmp_path, target, receipt_timeout_s=TIMEOUT_S, pool_bytes=2**16, writer_threads=1)
    job = shop.run(request(target, samples, storage={"shard_bytes": 2**30}))
    assert job.state is JobState.COMPLETED, job.problem
    assert job.progress.samples_written == ROWS
    shop.store.close()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("is_lost", [False, True])
def test_rows_of_a_rank_are_taken_for_lost_by_what_leaves_that_rank(
    monkeypatch: pytest.MonkeyPatch, slow: int, is_lost: bool
) -> None:
    """One holds ten rows of a unit; the other one none, and it takes many of other units meanwhile."""
    monkeypatch.setattr(receipt_errors, "LOADS", said := {0: LOAD, 1: LOAD})

    async def receipts() -> tuple[Receipt, ...]:
        for taken in range(30 if is_lost else 10):
            ahead = {"pool_waiting_samples": 0, "drained_samples": 100 * taken}
            behind = {"pool_waiting_samples": 10 - taken, "drained_samples": taken}
            stuck = {"pool_waiting_samples": 10, "drained_samples": 0}
            said[slow] = LOAD.model_copy(update=stuck if is_lost else behind)
            said[1 - slow] = LOAD.model_copy(update=ahead)
            await asyncio.sleep(0.15)
        return ()

    with pytest.raises(EngineStuck) if is_lost else nullcontext():
        assert asyncio.run(receipt_errors.in_time(receipts(), 0.2)) == ()


def test_proofs_that_hold_every_thread_delay_no_heartbeat_and_no_end(tmp_path: Path) -> None:
    """A host that seems away gives up no other one, and a lease that is not given back is a death."""
    disk, settings = threading.Event(), Settings(data_dir=tmp_path, roles=tuple(set(Role) - {Role.CAPTURE}))
    store = Store(settings.database())
    store.write(migration.migrate)
    capture = Capture(store, settings, "worker")

    async def beat() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        proof = asyncio.create_task(asyncio.to_thread(disk.wait))
        running = asyncio.create_task(capture.run())
        try:
            await until(lambda: store.read(workers.home_since) is not None, patience_s=10)
            capture.stop.set()
            await asyncio.wait_for(running, 10)
        finally:
            disk.set()
        await proof

    asyncio.run(beat())
    store.close()
