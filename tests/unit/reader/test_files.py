"""Whether a dataset is larger than the memory that could keep it."""

from pathlib import Path

import pytest

from service.reader import files
from service.reader.errors import ReaderError
from service.reader.files import LocalFiles


@pytest.mark.parametrize(("limit", "outgrown"), [("max", False), ("2999999", True), ("3000000", False)])
def test_files_outgrow_the_memory_that_the_container_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, outgrown: bool
) -> None:
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    (tmp_path / "limit").write_text(limit + "\n")
    monkeypatch.setattr(files, "_MEMORY_LIMIT", tmp_path / "limit")
    assert LocalFiles(tmp_path).outgrow_memory(["file"]) is outgrown


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReaderError, match="none cannot be read: No such file"):
        LocalFiles(tmp_path).outgrow_memory(["none"])
    with pytest.raises(ReaderError, match="none cannot be opened: No such file"):
        LocalFiles(tmp_path).open("none")
