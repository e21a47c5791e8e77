"""Files past the page cache hold the bytes that were given, however they lie in memory and are cut."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st

from schemas.dataset import direct
from schemas.dataset.direct import BLOCK_BYTES, STAGE_BYTES, DirectWriter
from tests.support.parquet import xxh3_of

CONTENT = np.random.default_rng(0).integers(0, 256, 3 * STAGE_BYTES + 77, np.uint8)
SIZES = st.sampled_from([1, 511, 512, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5, STAGE_BYTES + 9])


def aligned(data: bytes) -> memoryview:
    memory = direct.page_aligned(max(1, len(data)))
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return memory[: len(data)].data


def written(path: Path, pieces: list[bytes | memoryview]) -> str:
    file = DirectWriter(path)
    for piece in pieces:
        file.write(piece)
    return file.end()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.tuples(SIZES, st.booleans()), max_size=8))
def test_the_file_is_the_pieces_one_after_the_other(tmp_path: Path, cuts: list[tuple[int, bool]]) -> None:
    path, pieces = tmp_path / "file", []
    for size, on_a_page in cuts:
        piece = CONTENT[:size].tobytes()
        pieces.append(aligned(piece) if on_a_page else piece)
    whole = b"".join(bytes(piece) for piece in pieces)
    assert written(path, pieces) == xxhash.xxh3_128_hexdigest(whole) == xxh3_of(path)
    assert path.read_bytes() == whole


def test_padding_puts_what_follows_on_a_blocks_border(tmp_path: Path) -> None:
    file = DirectWriter(tmp_path / "file")
    file.write(b"x" * 10)
    file.pad(30)
    assert (file.position + 30) % BLOCK_BYTES == 0
    file.write(b"h" * 30)
    before = file.position
    file.pad(0)
    assert file.position == before
    file.end()
    assert (tmp_path / "file").read_bytes() == b"x" * 10 + bytes(BLOCK_BYTES - 40) + b"h" * 30


def test_what_lies_on_a_page_is_handed_to_the_kernel_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[int] = []
    write = os.write

    def spy(fd: int, data: Any) -> int:
        addresses.append(np.frombuffer(data, np.uint8).ctypes.data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", spy)
    payload = aligned(CONTENT.tobytes())
    written(tmp_path / "file", [payload])
    assert addresses[0] == np.frombuffer(payload, np.uint8).ctypes.data
    assert len(addresses) == 2  # the payload's whole blocks, and the rest


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EACCES])
def test_a_file_system_without_direct_writes_is_written_to_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """Any other refusal is the operating system's error."""
    real_open = os.open

    def open_without(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(refusal, "no direct writes here")
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_without)
    if refusal == errno.EINVAL:
        digest = written(tmp_path / "file", [CONTENT.tobytes()])
        assert digest == xxh3_of(tmp_path / "file") == xxhash.xxh3_128_hexdigest(CONTENT.data)
    else:
        with pytest.raises(PermissionError, match="no direct writes here"):
            DirectWriter(tmp_path / "file")


def test_a_refused_direct_write_is_made_again_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = os.write, []

    def refuse_once(fd: int, data: Any) -> int:
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "not aligned enough for this disk")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse_once)
    assert written(tmp_path / "file", [CONTENT.tobytes()]) == xxh3_of(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT.tobytes()
    assert refused


def test_a_full_disk_is_the_operating_systems_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    file = DirectWriter(tmp_path / "file")
    with pytest.raises(OSError, match="no space"):
        file.write(bytes(2 * STAGE_BYTES))
    for _ in range(2):
        file.close()
