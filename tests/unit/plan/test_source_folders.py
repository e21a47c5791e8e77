"""Which files of a folder are its rows."""

import os
from pathlib import Path
from typing import Any

import pytest

from schemas.request import FileSource
from service.errors import SourceRefused
from service.plan.sources.files import FileRows


def source(path: Path) -> FileSource:
    return FileSource(kind="file", path=str(path))


def fill(folder: Path) -> None:
    for name in ("b.jsonl", "in/a.jsonl", "in/deep/c.parquet", ".hidden/d.jsonl", "in/.e.jsonl", "f.txt"):
        folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(name).touch()


def test_files_are_found_in_name_order_and_hidden_ones_are_not(tmp_path: Path) -> None:
    fill(tmp_path)
    found = FileRows.find(source(tmp_path), (tmp_path,))
    assert found.names == ("b.jsonl", "in/a.jsonl", "in/deep/c.parquet")


def test_a_folder_that_may_not_be_read_is_refused_since_its_rows_would_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if Path(path).name in {"deep", ".hidden"}:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    # Who runs the tests may be root, to whom nothing is denied.
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(SourceRefused, match="Permission denied") as caught:
        FileRows.find(source(tmp_path), (tmp_path,))
    assert caught.value.field == "source.path"
