"""A disk that fails under a read is told with the shard that was read."""

import errno
import os
from typing import Any

import pytest

from service.reader import QuarryDataset


def test_an_error_of_the_disk_names_the_shard(dataset, monkeypatch):
    rows = QuarryDataset(dataset, direct=False)
    row = rows[3]

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error") as failed:
        row.layer(2)
    assert failed.value.filename == rows.shard_of(3)
