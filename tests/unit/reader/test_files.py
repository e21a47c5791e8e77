"""Byte ranges are read to where they belong, whole or scattered, through the page cache or past it."""

import ctypes
import errno
from pathlib import Path

import pytest
import torch

from service.reader import files, vectors
from service.reader.errors import ReaderError
from service.reader.files import LocalFile, LocalFiles
from service.reader.memory import Pool

OFFSET = 5


@pytest.fixture
def file(tmp_path: Path) -> tuple[LocalFile, torch.Tensor]:
    content = torch.randint(
        0, 256, (3_000_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    return LocalFile(tmp_path / "file"), content


@pytest.mark.parametrize("width", [16, 1024], ids=["copied to their places", "read to their places"])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 1025, 2500])
def test_rows_that_lie_apart_get_their_bytes_and_no_others(file, num_rows, width):
    opened, content = file
    whole_TW = torch.zeros((num_rows, 2 * width + 8), dtype=torch.uint8)
    part_TW = whole_TW[:, 8 : 8 + width]
    opened.read_into(part_TW, OFFSET)
    due = content[OFFSET : OFFSET + num_rows * width].view(num_rows, width)
    assert torch.equal(part_TW, due)
    part_TW.zero_()
    assert not whole_TW.any()


class Little:
    """A `preadv` that reads at most the first memory it is given, and every other time a third of that."""

    def __init__(self) -> None:
        self.real, self.calls = vectors._PREADV, 0

    def __call__(self, fd: int, address: int, _count: int, offset: int) -> int:
        self.calls += 1
        first = (ctypes.c_int64 * 2).from_address(address)
        if self.calls % 2:
            first[1] = max(1, first[1] // 3)
        return self.real(fd, address, 1, offset)


@pytest.mark.parametrize("apart", [True, False])
def test_a_call_that_gives_less_than_was_asked_for_is_repeated(file, monkeypatch, apart):
    opened, content = file
    little = Little()
    monkeypatch.setattr(vectors, "_PREADV", little)
    part_TW = torch.zeros((9, 4096 if apart else 2048), dtype=torch.uint8)[:, :2048]
    opened.read_into(part_TW, OFFSET)
    assert torch.equal(part_TW, content[OFFSET : OFFSET + 9 * 2048].view(9, 2048))
    assert little.calls > 1


def test_a_call_that_a_signal_cut_off_is_made_again_and_another_error_is_told(file, monkeypatch):
    opened, content = file
    real, answers = vectors._PREADV, [errno.EINTR, errno.EIO]

    def interrupted(fd: int, address: int, count: int, offset: int) -> int:
        if not answers:
            return real(fd, address, count, offset)
        ctypes.set_errno(answers.pop(0))
        return -1

    monkeypatch.setattr(vectors, "_PREADV", interrupted)
    part_TW = torch.zeros((3, 100), dtype=torch.uint8)
    with pytest.raises(OSError, match="Input/output error"):
        opened.read_into(part_TW, OFFSET)
    answers.append(errno.EINTR)
    opened.read_into(part_TW, OFFSET)
    assert torch.equal(part_TW, content[OFFSET : OFFSET + 300].view(3, 100))


class Counted:
    """A `preadv` that notes which files it reads how many bytes of."""

    def __init__(self, refused: int | None = None) -> None:
        self.real, self.refused = vectors._PREADV, refused
        self.num_bytes: dict[int, int] = {}

    def __call__(self, fd: int, address: int, count: int, offset: int) -> int:
        if fd == self.refused:
            ctypes.set_errno(errno.EINVAL)
            return -1
        num_bytes = self.real(fd, address, count, offset)
        self.num_bytes[fd] = self.num_bytes.get(fd, 0) + num_bytes
        return num_bytes


def shape_of(kind: str) -> torch.Tensor:
    """Return zeros, uint8 [T, W], in memory that begins on a page."""
    if kind == "whole":
        return Pool().lend(250 * 9000).zero_().view(250, 9000)
    width = {"apart": 1024, "off the borders": 1000}[kind]
    return Pool().lend(2000 * 2 * width).zero_().view(2000, 2 * width)[:, width:]


@pytest.mark.parametrize(
    ("kind", "share"),
    [("whole", 0.99), ("apart", 1.0), ("off the borders", 0.0)],
    ids=lambda value: str(value),
)
def test_what_lies_on_borders_of_blocks_is_read_past_the_page_cache(file, monkeypatch, kind, share):
    opened, content = file
    direct = LocalFile(opened._path, direct=True)
    assert direct._direct_fd is not None
    out_TW, counted = shape_of(kind), Counted()
    monkeypatch.setattr(vectors, "_PREADV", counted)
    direct.read_into(out_TW, 8192)
    assert torch.equal(out_TW, content[8192 : 8192 + out_TW.numel()].view(out_TW.shape))
    found = counted.num_bytes.get(direct._direct_fd, 0) / out_TW.numel()
    assert share <= found <= share + 0.01


@pytest.mark.parametrize("offset", [5, 4096 + 512])
def test_what_does_not_begin_on_a_block_is_read_as_usual(file, monkeypatch, offset):
    opened, content = file
    direct, counted = LocalFile(opened._path, direct=True), Counted()
    monkeypatch.setattr(vectors, "_PREADV", counted)
    out_TW = shape_of("whole")
    direct.read_into(out_TW, offset)
    assert torch.equal(out_TW, content[offset : offset + out_TW.numel()].view(out_TW.shape))
    assert set(counted.num_bytes) == {direct._fd}


def test_a_file_system_that_refuses_is_read_from_as_usual_ever_after(file, monkeypatch):
    opened, content = file
    direct = LocalFile(opened._path, direct=True)
    counted = Counted(refused=direct._direct_fd)
    monkeypatch.setattr(vectors, "_PREADV", counted)
    for _ in range(2):
        out_TW = shape_of("apart")
        direct.read_into(out_TW, 8192)
        assert torch.equal(out_TW, content[8192 : 8192 + out_TW.numel()].view(out_TW.shape))
        counted.refused = None
    assert set(counted.num_bytes) == {direct._fd}


@pytest.mark.parametrize("direct", [True, False])
def test_a_range_that_is_expected_reads_the_same(file, direct):
    opened, content = file
    again = LocalFile(opened._path, direct=direct)
    out_TW = shape_of("whole")
    again.expect([(8192, out_TW.numel()), (2**40, 5)])
    again.read_into(out_TW, 8192)
    assert torch.equal(out_TW, content[8192 : 8192 + out_TW.numel()].view(out_TW.shape))


@pytest.mark.parametrize(("limit", "outgrown"), [("max", False), ("2999999", True), ("3000000", False)])
def test_files_outgrow_the_memory_that_the_container_may_take(file, tmp_path, monkeypatch, limit, outgrown):
    (tmp_path / "limit").write_text(limit + "\n")
    monkeypatch.setattr(files, "_MEMORY_LIMIT", tmp_path / "limit")
    assert LocalFiles(tmp_path).outgrow_memory(["file"]) is outgrown


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(ReaderError, match="none cannot be read: No such file"):
        LocalFiles(tmp_path).outgrow_memory(["none"])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_file_that_ends_too_early_is_refused(file, apart, direct):
    opened, content = file
    opened = LocalFile(opened._path, direct=direct)
    part_TW = torch.zeros((9, 4096 if apart else 2048), dtype=torch.uint8)[:, :2048]
    with pytest.raises(ReaderError, match=f"ends at byte {len(content)}: it is truncated"):
        opened.read_into(part_TW, len(content) - 3000)


def test_a_file_that_ends_too_early_is_refused_past_the_page_cache_too(file):
    opened, content = file
    out_TW = Pool().lend(2**22).view(2, -1)
    with pytest.raises(ReaderError, match=f"ends at byte {len(content)}: it is truncated"):
        LocalFile(opened._path, direct=True).read_into(out_TW, 0)
