"""Byte ranges are read to where they belong, whole or scattered, however little one call gives."""

import os
from pathlib import Path

import pytest
import torch

from service.reader.errors import ReaderError
from service.reader.files import LocalFile

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


@pytest.mark.parametrize("apart", [True, False])
def test_a_call_that_gives_less_than_was_asked_for_is_repeated(file, monkeypatch, apart):
    opened, content = file
    real, calls = os.preadv, []

    def little(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        first = buffers[0][: max(1, len(buffers[0]) // 3)] if len(calls) % 2 else buffers[0]
        return real(fd, [first], offset)

    monkeypatch.setattr(os, "preadv", little)
    part_TW = torch.zeros((9, 4096 if apart else 2048), dtype=torch.uint8)[:, :2048]
    opened.read_into(part_TW, OFFSET)
    assert torch.equal(part_TW, content[OFFSET : OFFSET + 9 * 2048].view(9, 2048))
    assert len(calls) > 1


@pytest.mark.parametrize("apart", [True, False])
def test_a_file_that_ends_too_early_is_refused(file, apart):
    opened, content = file
    part_TW = torch.zeros((9, 4096 if apart else 2048), dtype=torch.uint8)[:, :2048]
    with pytest.raises(ReaderError, match=f"ends at byte {len(content)}: it is truncated"):
        opened.read_into(part_TW, len(content) - 3000)
