"""A source that is taken several times, each time in another order."""

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from schemas.job import JobState
from schemas.request import ExtractRequest
from schemas.source import InlineSource, Sample
from service.errors import WriteFailed
from service.plan.sources.one_pass import SHUFFLED_ROWS, OnePass
from service.plan.sources.rows import InlineRows, SourceRow
from service.proof.verify import verify_dataset
from service.store import Store, jobs, plans
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture, run_planning

SAMPLES = 30
STORAGE = {"shard_bytes": 65_536, "retention": "consumed"}


def repeated(target: Path, repeat: object, seed: int | None = 7, **changes: Any) -> ExtractRequest:
    samples = conversations(SAMPLES, longest=40)
    source = {"kind": "inline", "samples": list(samples), "repeat": repeat, "seed": seed}
    return request(target, samples, layers=(1, 2), storage=STORAGE, source=source, **changes)


def by_units(shop: Shop, job_id: str) -> list[str]:
    """Return the ids of the rows, unit by unit."""
    files = sorted((shop.settings.dataset_dir(job_id) / "index" / job_id).glob("*.parquet"))
    return [name for file in files for name in pq.read_table(file)["source_id"].to_pylist()]


def test_every_pass_is_shuffled_otherwise_and_the_same_when_it_is_read_again() -> None:
    """More rows than are shuffled at a time; without a seed they keep their order."""
    samples = tuple(Sample(text="x") for _ in range(SHUFFLED_ROWS + 500))
    source = InlineRows(InlineSource(kind="inline", samples=samples))

    def order(number: int, seed: int | None) -> list[str]:
        return [
            row.source_id.partition("#")[0] for row in OnePass(source, number, seed, is_only=False).rows()
        ]

    as_it_stands = order(1, None)
    assert as_it_stands == [str(number) for number in range(len(samples))]
    orders = [order(0, 7), order(1, 7), order(0, 8)]
    assert all(sorted(one) == sorted(as_it_stands) for one in orders)
    assert len({tuple(one) for one in (*orders, as_it_stands)}) == 4
    assert order(1, 7) == orders[1]


def test_rows_that_wait_to_be_shuffled_take_no_more_than_their_text() -> None:
    tokens = tuple(range(1000, 3000))

    class Long(InlineRows):
        def rows(self) -> Iterator[SourceRow]:
            text = json.dumps({"token_ids": tokens})
            return (SourceRow(str(n), Sample.model_validate_json(text)) for n in range(SHUFFLED_ROWS + 1))

    source = Long(InlineSource(kind="inline", samples=(Sample(text="x"),)))
    tracemalloc.start()
    try:
        rows = OnePass(source, 0, 7, is_only=True).rows()
        row = next(rows)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(row.content, Sample) and row.content.token_ids == tokens
    assert held < SHUFFLED_ROWS * len(json.dumps(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("part", [None, {"index": 2, "of": 3}])
def test_each_pass_has_every_row_once(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch, part: dict[str, int] | None
) -> None:
    monkeypatch.setattr(plans, "AHEAD_UNITS", 1)
    rows = SAMPLES if part is None else SAMPLES // 3
    job_id = shop.submit(repeated(target, 3, None if part else 7, part=part))
    for passes in (1, 2, 3):
        shop.plan()
        assert shop.store.read(jobs.job, job_id).progress.samples_planned == passes * rows
        asyncio.run(captured(shop, job_id, passes * rows))
    shop.publish()
    job = shop.store.read(jobs.job, job_id)
    assert job.state is JobState.COMPLETED, job.problem
    ids = by_units(shop, job_id)
    parted = [name.partition("#") for name in ids]
    bare = [[name for name, _, _ in parted[start : start + rows]] for start in range(0, 3 * rows, rows)]
    assert [
        {number for _, _, number in parted[start : start + rows]} for start in range(0, 3 * rows, rows)
    ] == [{"1"}, {"2"}, {"3"}]
    assert all(len(set(names)) == rows for names in bare)
    if part is None:
        assert sorted(bare[0]) == sorted(bare[1]) == sorted(bare[2])
    report = verify_dataset(shop.settings.dataset_dir(job_id))
    assert report.ok, report
    assert report.rows == 3 * rows


async def captured(shop: Shop, job_id: str, num_rows: int) -> None:
    """Capture until so many rows are there."""
    loop = Capture(shop.store, shop.settings, "worker", only_job=job_id)
    running = asyncio.create_task(loop.run())
    while not running.done() and shop.store.read(jobs.job, job_id).progress.samples_written < num_rows:
        await asyncio.sleep(0.02)
    loop.stop.set()
    await running


@pytest.mark.slow
def test_a_pass_that_is_planned_again_is_the_same(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the second pass fails."""
    job_id, finish, calls = shop.submit(repeated(target, 2)), plans.finish, 0

    def away_once(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise WriteFailed("the disk is away")
        finish(*arguments, **options)

    monkeypatch.setattr(plans, "finish", away_once)
    shop.plan()
    job = shop.store.read(jobs.job, job_id)
    assert (job.progress.samples_planned, job.progress.plan_done) == (2 * SAMPLES, False)
    planned_again(shop.store, shop, job_id)
    job = shop.store.read(jobs.job, job_id)
    assert (job.progress.samples_planned, job.progress.plan_done) == (2 * SAMPLES, True)
    assert job.problem is None


def planned_again(store: Store, shop: Shop, job_id: str) -> None:
    """Plan until it is done; an attempt that failed is made again after a pause."""
    while not store.read(jobs.job, job_id).progress.plan_done:
        run_planning(store, shop.settings, "planner", lambda: False)


@pytest.mark.slow
def test_one_that_goes_on_forever_is_planned_a_little_ahead_until_it_is_cancelled(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "AHEAD_UNITS", 2)
    job_id = shop.submit(repeated(target, "forever"))
    units = 0
    for passes in range(1, 5):
        shop.plan()
        progress = shop.store.read(jobs.job, job_id).progress
        assert (progress.samples_planned, progress.plan_done) == (passes * SAMPLES, False)
        units = units or progress.units_planned
        assert progress.units_planned - progress.units_done <= 2 + 2 * units
        asyncio.run(captured(shop, job_id, passes * SAMPLES))
    shop.store.write(jobs.cancel, job_id)
    shop.plan()
    assert shop.store.read(jobs.job, job_id).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"storage": {"shard_bytes": 65_536}}, "'source.repeat' goes with 'storage.retention': 'consumed'"),
        ({"repeat": 0}, "source.inline.repeat"),
        ({"part": {"index": 1, "of": 2}}, "'source.seed' goes without 'part'"),
    ],
)
def test_what_cannot_be_repeated_is_refused(target: Path, changes: dict[str, Any], what: str) -> None:
    body = {"storage": STORAGE} | changes
    repeat = {"repeat": body.pop("repeat", 2), "seed": 7}
    source = {"kind": "inline", "samples": list(conversations(1)), **repeat}
    with pytest.raises(ValidationError, match=what):
        request(target, [], source=source, **body)


def test_a_part_of_a_mix_is_not_repeated_by_itself(target: Path) -> None:
    part = {"source": {"kind": "file", "path": "/rows.jsonl", "repeat": 2}}
    with pytest.raises(ValidationError, match="give 'repeat' and 'seed' to the mix"):
        request(target, [], source={"kind": "mix", "sources": [part]}, storage=STORAGE)
