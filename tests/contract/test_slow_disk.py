"""A disk that is slower than the engine delays a job, and nothing is taken for lost meanwhile."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from schemas.dataset.framing import Page, ShardFile
from schemas.job import JobState
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids

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
