"""Files of a dataset: what is said where they cannot be read."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.dataset.entries import entry_of
from schemas.dataset.jobs_table import git_oid
from schemas.dataset.tables import read_table
from service.artifacts.dataset_files import HubFiles, LocalFiles, open_named, read_file
from service.errors import HubUnavailable, OptionRefused
from service.reader.errors import ReaderError
from service.reader.follow import _Repository
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Fault, large_blob


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReaderError, match="none cannot be opened: No such file"):
        LocalFiles(tmp_path).open("none")


@pytest.mark.parametrize(
    ("endpoint", "read"),
    [
        ("info", lambda _: None),
        ("tree", lambda files: files.open("a.parquet").num_bytes),
        ("resolve", lambda files: files.open("a.parquet").read(0, 5)),
        ("resolve", lambda files: read_table(files.open("a.parquet").arrow())),
    ],
)
@pytest.mark.parametrize(
    ("status", "error", "detail"),
    [
        (403, OptionRefused, "the Hub answered 403 for .*org/set"),
        (503, HubUnavailable, "the Hub answered 503"),
    ],
)
def test_what_the_hub_refuses_is_told_from_what_it_does_not_give_now(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, read: Callable[[HubFiles], object], status, error, detail
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with FakeHub() as hub:
        hub.add_repo("org/set", {"a.parquet": b"many bytes"})
        if endpoint == "info":
            hub.fail(endpoint, Fault(status=status, times=1000))
        with pytest.raises(error, match=detail) as refused:
            files = HubFiles("org/set", endpoint=hub.url)
            hub.fail(endpoint, Fault(status=status, times=1000))
            read(files)
        assert refused.value.field == "repo_id"


def test_a_repository_says_what_its_files_are_without_their_bytes() -> None:
    """Long files by their sha256, others by the name that git gives them."""
    long = {"a/x.parquet": b"long"}
    with FakeHub() as hub:
        hub.add_repo("org/set", {"a/1.json": b"one", "a/b/2.json": b"two"} | long)
        names = HubFiles("org/set", endpoint=hub.url).names("a")
        assert names == {"a/1.json": git_oid(b"one"), "a/x.parquet": hashlib.sha256(b"long").hexdigest()}
        assert hub.paths_read == []


def test_a_repository_lists_and_holds_what_its_commit_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with FakeHub() as hub:
        repo = hub.add_repo(
            "org/set",
            {"manifests/1.json": b"one", "manifests/b/2.json": b"two", "manifests/3.txt": b"", ".x": b""},
        )
        files = HubFiles("org/set", endpoint=hub.url)
        repo.add("newer", {}, deleted=["manifests/1.json"])
        assert files.paths() == ["manifests/1.json", "manifests/3.txt", "manifests/b/2.json"]
        assert files.manifests() == ["manifests/1.json"]
        assert read_file(files, "manifests/1.json") == b"one"
        with pytest.raises(ReaderError, match="manifests/4 cannot be opened: it is not in org/set"):
            files.open("manifests/4")
        with files.held(["manifests/1.json", "manifests/4"]) as folder:
            assert [path.name for path in folder.rglob("*.json")] == ["1.json"]
        assert not list(tmp_path.iterdir())


def test_an_open_file_outlives_its_commit_where_the_newest_one_has_the_same() -> None:
    """1. A history is squashed, and one file is another from then on. 2. It is squashed again."""
    with FakeHub() as hub:
        hub.add_repo("org/set", {"a/x.parquet": b"same", "a/y.parquet": b"old"})
        repo, files = hub.repo("org/set"), HubFiles("org/set", endpoint=hub.url)
        same, other = (files.open(f"a/{name}.parquet") for name in "xy")
        new = {"a/y.parquet": large_blob(hashlib.sha256(b"new").hexdigest(), 3, b"new")}
        for number in range(2):
            repo.add(f"squashed {number}", {**repo.commits.pop().tree, **new})
            assert same.read(0, same.num_bytes).tobytes() == b"same"
            with pytest.raises(OptionRefused, match="the Hub answered 404"):
                other.read(0, 3)


def test_a_file_that_a_manifest_names_outlives_the_commits_that_had_it() -> None:
    """1. A history is squashed, and one folder listed. 2. It is squashed again. 3. Others are opened."""
    same, old = (entry_of(f"b/{name}.parquet", name.encode()) for name in ("same", "old"))
    with FakeHub() as hub:
        repo = hub.add_repo("org/set", {"a/x.parquet": b"x", same.path: b"same", old.path: b"old"})
        files = HubFiles("org/set", endpoint=hub.url)
        file = files.open("a/x.parquet")
        for number in range(2):
            tree = repo.commits.pop().tree
            new = {old.path: large_blob(hashlib.sha256(b"new").hexdigest(), 3, b"new")}
            repo.add(f"squashed {number}", {**tree, **new})
            assert file.read(0, 1).tobytes() == b"x"
        assert open_named(files, same).read(0, 4).tobytes() == b"same"
        with pytest.raises(OptionRefused, match="the Hub answered 404"):
            open_named(files, old)


def test_a_repository_whose_history_is_rewritten_is_followed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are looked for in the newest commit where the one that had the indexes is gone."""
    with FakeHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        repo = hub.add_repo("org/set", {"index/j/0.parquet": b"index", "data/j/0.parquet": b"data"})
        followed = _Repository(patience_s=0.0)
        assert followed.open("org/set", "index/j/0.parquet").num_bytes == 5
        repo.add("squashed", repo.commits.pop().tree)
        assert followed.open("org/set", "data/j/0.parquet").num_bytes == 4
