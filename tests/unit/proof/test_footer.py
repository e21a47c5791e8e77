"""The footer of a sealed file is held against its receipt before it is believed in anything."""

from contextlib import closing
from pathlib import Path

import pytest

from schemas.dataset import files
from schemas.dataset.direct import BLOCK_BYTES
from schemas.dataset.errors import DatasetError
from schemas.dataset.files import DirectReader
from service.proof.checks import _check_footer
from tests.support.reference_models import TinyModel
from tests.support.shards import capture, seal_attempt


def test_a_footers_length_is_not_believed_with_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = capture(TinyModel(tmp_path / "model", "llama", "bfloat16"), dtype="bfloat16")
    receipt = seal_attempt(tmp_path, captured.provenance, dict(enumerate(captured.rows)))
    file = tmp_path / receipt.file
    with closing(DirectReader(file)) as reader:
        _check_footer(reader, receipt)
    content = bytearray(file.read_bytes())
    content[-5] ^= 0x7F  # the highest byte of the footer's length
    file.write_bytes(content)
    asked, memory = [], files.page_aligned
    monkeypatch.setattr(files, "READ_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(files, "page_aligned", lambda num_bytes: asked.append(num_bytes) or memory(num_bytes))
    with (
        closing(DirectReader(file)) as reader,
        pytest.raises(DatasetError, match=r"the footer of .* has xxh3"),
    ):
        _check_footer(reader, receipt)
    assert asked == [2 * BLOCK_BYTES] < [len(content)]
