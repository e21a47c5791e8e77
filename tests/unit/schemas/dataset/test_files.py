"""Byte ranges of a local file: through the page cache, past it, or as a private map."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.dataset.files import LocalFile

CONTENT = np.random.default_rng(1).integers(0, 256, 3_000_001, np.uint8)
WAYS = pytest.mark.parametrize("way", [{}, {"direct": True}, {"memory_map": True}], ids=str)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT.tobytes())
    return tmp_path / "file"


@WAYS
@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(0, 3_000_001), (0, 0), (5, 1), (4096, 8192), (4095, 2), (8191, 70_000), (2_999_999, 2), (3_000_001, 0)],
)
def test_a_range_is_read_to_memory_of_its_own(path: Path, way: Any, offset: int, num_bytes: int) -> None:
    file = LocalFile(path, **way)
    first, second = (file.read(offset, num_bytes) for _ in range(2))
    assert (first == CONTENT[offset : offset + num_bytes]).all()
    first[:] = 0
    assert (second == CONTENT[offset : offset + num_bytes]).all()
    file.close()
    file.close()
    assert path.read_bytes() == CONTENT.tobytes()


@WAYS
@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(3_000_000, 2), (3_000_002, 0), (0, 2**60), (2**60, 1), (-1, 1), (5, -1)]
)
def test_a_range_that_the_file_has_not_is_refused_before_memory_is_taken(
    path: Path, way: Any, offset: int, num_bytes: int
) -> None:
    with pytest.raises(EOFError, match="the file ends at 3000001"):
        LocalFile(path, **way).read(offset, num_bytes)


@pytest.mark.parametrize("way", [{}, {"direct": True}], ids=str)
def test_a_file_that_was_cut_short_after_it_was_opened_is_named(path: Path, way: Any) -> None:
    file = LocalFile(path, **way)
    os.truncate(path, 10_000)
    with pytest.raises(EOFError, match="the file ends at 10000"):
        file.read(4096, 100_000)


def test_a_disk_that_refuses_direct_reads_is_read_through_the_page_cache_from_then_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, preadv, refused = LocalFile(path, direct=True), os.preadv, []

    def refuse_once(fd: int, *rest: Any) -> int:
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "not here")
        return preadv(fd, *rest)

    monkeypatch.setattr(os, "preadv", refuse_once)
    for _ in range(2):
        assert (file.read(5, 9000) == CONTENT[5:9005]).all()
    assert refused


def test_a_call_that_gives_less_than_was_asked_for_is_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][: len(parts[0]) // 3 + 1]], at)
    )
    assert (LocalFile(path).read(5, 9000) == CONTENT[5:9005]).all()
