"""Byte ranges of a local file: through the page cache or past it."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from schemas.dataset.direct import BLOCK_BYTES
from schemas.dataset.files import PIECE_BYTES, DirectReader, LocalFile

CONTENT = np.random.default_rng(1).integers(0, 256, 3_000_001, np.uint8)
WAYS = pytest.mark.parametrize("way", [{}, {"direct": True}], ids=str)


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
    with pytest.raises(EOFError, match="the file ends at byte 3000001"):
        LocalFile(path, **way).read(offset, num_bytes)


@WAYS
def test_a_file_that_was_cut_short_after_it_was_opened_is_named(path: Path, way: Any) -> None:
    file = LocalFile(path, **way)
    os.truncate(path, 10_000)
    with pytest.raises(EOFError, match="the file ends at byte 10000"):
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


@pytest.mark.parametrize("direct", [False, True])
def test_only_a_direct_read_takes_whole_blocks_to_memory_that_begins_on_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    preadv, read = os.preadv, []

    def spy(fd: int, parts: Any, at: int) -> int:
        read.append((np.frombuffer(parts[0], np.uint8).ctypes.data % BLOCK_BYTES, at, len(parts[0])))
        return preadv(fd, parts, at)

    monkeypatch.setattr(os, "preadv", spy)
    LocalFile(path, direct=direct).read(BLOCK_BYTES + 5, 9000)
    if direct:
        assert read == [(0, BLOCK_BYTES, 3 * BLOCK_BYTES)]
    else:
        assert [part[1:] for part in read] == [(BLOCK_BYTES + 5, 9000)]


def test_a_call_that_gives_less_than_was_asked_for_is_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][: len(parts[0]) // 3 + 1]], at)
    )
    assert (LocalFile(path).read(5, 9000) == CONTENT[5:9005]).all()


LONG = np.resize(CONTENT, 3 * PIECE_BYTES + 12_345)


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[DirectReader]:
    (tmp_path / "long").write_bytes(LONG.tobytes())
    with closing(DirectReader(tmp_path / "long")) as reader:
        yield reader


def test_a_reader_goes_front_to_back_and_hashes_all_of_it_once(direct: DirectReader) -> None:
    ends = [0, 5, BLOCK_BYTES + 1, PIECE_BYTES + 100]
    for begin, end in pairwise([0, *ends]):
        assert (direct.upto(end) == LONG[begin:end]).all()
    assert (direct.read(7, 100) == LONG[7:107]).all()
    assert (direct.read(ends[-1] + 50, 10) == LONG[ends[-1] + 50 :][:10]).all()
    sha256 = hashlib.sha256(LONG.data).hexdigest()
    assert direct.rest() == (xxhash.xxh3_128_hexdigest(LONG.data), sha256)


@pytest.mark.parametrize("num_bytes", [1, 100, BLOCK_BYTES + 7, PIECE_BYTES + 5, LONG.size, LONG.size + 1])
def test_the_hash_of_a_tail_is_taken_in_the_memory_of_one_buffer(
    direct: DirectReader, num_bytes: int
) -> None:
    assert direct.tail_xxh3(num_bytes) == xxhash.xxh3_128_hexdigest(LONG[-num_bytes:].tobytes())
    assert direct._buffer.size == 2 * PIECE_BYTES
    assert (direct.tail(min(num_bytes, 100)) == LONG[-min(num_bytes, 100) :]).all()
    assert direct.position == 0


@WAYS
def test_the_mapping_is_of_the_file_that_was_opened(path: Path, way: Any) -> None:
    file = LocalFile(path, **way)
    path.with_name("new").write_bytes(bytes(3_000_001))
    path.with_name("new").rename(path)
    assert (file.mapping == CONTENT).all()
    file.mapping[0] ^= 1
    assert not path.read_bytes()[0]
