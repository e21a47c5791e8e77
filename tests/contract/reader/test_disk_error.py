"""A disk that fails under a read is told with the shard that was read."""

import ctypes
import errno

import pytest

from service.reader import QuarryDataset, vectors


def test_an_error_of_the_disk_names_the_shard(dataset, monkeypatch):
    rows = QuarryDataset(dataset, direct=False)
    row = rows[3]

    def broken(fd: int, address: int, count: int, offset: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(vectors, "_PREADV", broken)
    with pytest.raises(OSError, match="Input/output error") as failed:
        row.layer(2)
    assert failed.value.filename == rows.shard_of(3)
