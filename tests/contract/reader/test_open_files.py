"""How many files a trainer's process has open: a few, however many rows it reads or holds."""

import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from service.artifacts.dataset_files import LocalFiles
from service.reader import QuarryDataset, QuarryStream, rows as dataset_rows
from service.reader.jobs import read_jobs
from service.reader.places import read_places
from service.reader.rows import OpenRows, Rows
from tests.contract.reader.test_dataset import assert_right
from tests.support.finished_job import JOB
from tests.support.followed import EVERY, ROWS, UNITS, Followed, ids


def num_open_files() -> int:
    """Return how often this process has a shard or an index open."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a service in this process closed it meanwhile
            links.append(descriptor.readlink())
    return sum(link.suffix == ".parquet" for link in links)


def test_no_more_shards_are_open_than_are_kept_while_rows_are_held(plain, monkeypatch):
    monkeypatch.setattr(dataset_rows, "OPEN_SHARDS", 2)
    rows, before = QuarryDataset(plain), num_open_files()
    held = list(rows)
    assert len({rows.shard_of(number) for number in range(len(rows))}) > 6
    assert num_open_files() <= before + 4
    for row in (held[0], held[-1], held[0]):
        assert_right(row)


def test_a_dataset_and_its_files_go_with_its_last_row(plain, uncollected):
    before = num_open_files()
    rows = QuarryDataset(plain)
    there, row = weakref.ref(rows), rows[3]
    del rows
    assert_right(row)
    del row
    assert there() is None
    assert num_open_files() == before


def test_a_units_files_are_closed_behind_its_last_row(followed: Followed, uncollected: None) -> None:
    followed.capture(UNITS)
    followed.complete()
    before, rows = num_open_files(), QuarryStream.follow(followed.dataset, JOB, rank=0, world_size=1)
    num_open = [num_open_files() - before for _ in rows]
    assert len(num_open) == UNITS * ROWS
    assert set(num_open) == {2}, "one shard, which is read past its footer, too"


def test_units_of_several_ranks_are_closed_by_their_number_of_shards(plain, monkeypatch, uncollected):
    """Each rank writes a shard of its own, so that 64 units may have as many files as a process may open."""
    monkeypatch.setattr(dataset_rows, "OPEN_SHARDS", 8)
    files = LocalFiles(plain)
    (job,) = read_jobs(files, None).values()
    before, opened, held = num_open_files(), OpenRows(), []
    for _ in range(3):
        held.append(rows := Rows(files, job.shards, read_places(files, job.indexes), None, opened=opened))
        for number in range(len(rows)):
            rows.row(number)
            assert num_open_files() <= before + 2 * 8


def test_a_block_of_many_units_does_not_keep_all_of_them_open(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, uncollected: None
) -> None:
    monkeypatch.setattr(dataset_rows, "OPEN_SHARDS", 1)
    followed.capture(UNITS)
    followed.complete()
    before, num_open, rows = num_open_files(), [], []
    for row in QuarryStream.follow(followed.dataset, JOB, rank=0, world_size=1, window=UNITS * ROWS):
        num_open.append(num_open_files() - before)
        rows.append(row)
    assert max(num_open) == 2, "one shard, which is read past its footer, too"
    assert sorted(ids(rows)) == EVERY


def test_rows_that_are_read_behind_their_follower_do_not_keep_all_units_open(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, uncollected: None
) -> None:
    monkeypatch.setattr(dataset_rows, "OPEN_SHARDS", 1)
    followed.capture(UNITS)
    followed.complete()
    expected = {row.sample_id: row.last() for row in list(QuarryDataset(followed.dataset))}
    before, rows = num_open_files(), list(QuarryStream.follow(followed.dataset, JOB, rank=0, world_size=1))
    for row in (*rows, *reversed(rows)):
        assert torch.equal(row.last(), expected[row.sample_id])
        assert num_open_files() - before <= 2, "one shard, which is read past its footer, too"
