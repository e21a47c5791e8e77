"""A dataset's files are the same to who reads them, in a folder or in a repository."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.hf_file_system import HfFileSystemFile

from schemas.dataset.entries import entry_of
from schemas.dataset.errors import DatasetError
from service.artifacts.dataset_files import Files, HubFiles, LocalFiles, open_named, read_file
from tests.support.fake_hub import FakeHub

TABLE = pa.table({"a": list(range(1000))})
CONTENT = {
    "README.md": b"a card",
    "data/j-1/train-00000.parquet": b"",
    "data/j-1/train-00001.parquet": bytes(range(256)) * 40,
    "data/j-1/notes.parquet/inner.txt": b"below a folder that is named as a shard is",
    "data/train-00002.parquet": b"not of the job",
    "manifests/empty.json": b"",
    "manifests/notes.txt": b"no manifest",
    "manifests/folder.json/inner.json": b"below a folder that is named as a manifest is",
    "other/manifests/x.json": b"not of this dataset",
    ".cache/tool.json": b"a tool's",
}
SHARD = "data/j-1/train-00001.parquet"


@pytest.fixture(params=["folder", "lfs", "xet"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """The same files in each place that a dataset is read from."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    pq.write_table(TABLE, table := tmp_path / "table.parquet")
    content = CONTENT | {"data/j-1/train-00000.parquet": table.read_bytes()}
    if request.param == "folder":
        for path, data in content.items():
            file = tmp_path / "dataset" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        yield LocalFiles(tmp_path / "dataset")
        return
    with FakeHub(cas=tmp_path / "cas" if request.param == "xet" else None, page_entries=2) as hub:
        hub.add_repo("org/set", content)
        yield HubFiles("org/set", endpoint=hub.url)


def test_all_files_are_listed_but_those_of_tools(files: Files) -> None:
    assert files.paths() == sorted(path for path in CONTENT if not path.startswith("."))


def test_the_manifests_are_found(files: Files) -> None:
    assert files.manifests() == ["manifests/empty.json"]


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 1), (250, 12), (10_000, 240), (0, 10_240), (7, 0)])
def test_a_range_is_read_into_memory_of_the_callers_own(files: Files, offset: int, num_bytes: int) -> None:
    file = files.open(SHARD)
    data = file.read(offset, num_bytes)
    assert data.tobytes() == CONTENT[SHARD][offset : offset + num_bytes]
    data[:] = 0
    assert file.read(offset, num_bytes).tobytes() == CONTENT[SHARD][offset : offset + num_bytes]


@pytest.mark.parametrize(("offset", "num_bytes"), [(10_239, 2), (10_240, 1), (20_000, 5)])
def test_a_range_beyond_the_end_is_refused(files: Files, offset: int, num_bytes: int) -> None:
    with pytest.raises(EOFError):
        files.open(SHARD).read(offset, num_bytes)


def test_arrow_reads_a_shard(files: Files) -> None:
    with pq.ParquetFile(files.open("data/j-1/train-00000.parquet").arrow()) as opened:
        assert opened.read().equals(TABLE)


def test_a_file_has_its_length_and_its_bytes(files: Files) -> None:
    for path, content in CONTENT.items():
        if path in files.paths() and path != "data/j-1/train-00000.parquet":
            assert files.open(path).num_bytes == len(content)
            assert read_file(files, path) == content


@pytest.mark.parametrize("path", ["none.json", "data/j-1", "data/none/x.parquet"])
def test_what_is_no_file_is_named(files: Files, path: str) -> None:
    with pytest.raises(DatasetError, match=f"{path} cannot be opened"):
        files.open(path)


def test_those_that_exist_are_held_whole_by_their_paths(files: Files) -> None:
    with files.held([SHARD, "README.md", "none.json"]) as folder:
        for path in (SHARD, "README.md"):
            held = hashlib.sha256((folder / path).read_bytes()).digest()
            assert held == hashlib.sha256(CONTENT[path]).digest()
        assert not (folder / "none.json").exists()


@pytest.mark.parametrize("change", [{"path": "../secret"}, {"path": "/etc/passwd"}, {"bytes": 10_241}])
def test_an_entry_that_is_not_what_is_there_is_refused(files: Files, change: dict[str, Any]) -> None:
    entry = entry_of(SHARD, CONTENT[SHARD])
    assert open_named(files, entry).num_bytes == 10_240
    with pytest.raises(DatasetError):
        open_named(files, entry.model_copy(update=change))


def test_a_repositorys_file_with_another_sha256_is_refused(files: Files) -> None:
    entry = entry_of(SHARD, CONTENT[SHARD][::-1])
    if isinstance(files, LocalFiles):  # hashing would read all of it
        assert open_named(files, entry).num_bytes == 10_240
    else:
        with pytest.raises(DatasetError, match=f"{SHARD} has sha256 .*, its manifest says {entry.sha256}"):
            open_named(files, entry)


def test_a_range_of_a_repositorys_file_costs_its_bytes(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(files, LocalFiles):
        return
    file, fetch = files.open(SHARD), HfFileSystemFile._fetch_range
    fetched: list[tuple[int, int]] = []

    def fetching(file: HfFileSystemFile, start: int, end: int) -> bytes:
        fetched.append((start, end))
        return fetch(file, start, end)

    monkeypatch.setattr(HfFileSystemFile, "_fetch_range", fetching)
    file.read(250, 12)
    file.read(10, 4000)
    assert fetched == [(250, 262), (10, 4010)]
