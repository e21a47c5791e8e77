import hashlib
import os
from pathlib import Path

import pytest

from schemas.dataset.seal import make_folder, move_durably, seal, sealing, sha256_of, temporary


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Every fsync and every rename of the test, in order, with the path that it is called on."""
    taken: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(fd: int) -> None:
        taken.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    def watched_replace(source: Path, final: Path) -> Path:
        taken.append(("rename", source))
        return replace(source, final)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    return taken


def test_a_file_has_its_final_name_only_when_it_is_whole(tmp_path):
    final = tmp_path / "folder" / "shard.parquet"
    with sealing(final) as temp:
        temp.write_bytes(b"states")
        assert not final.exists()
        assert temp.parent == final.parent
    assert final.read_bytes() == b"states"
    assert list(final.parent.iterdir()) == [final]


def test_who_seals_a_file_never_publishes_what_another_attempt_is_writing(tmp_path):
    final = tmp_path / "manifest.json"
    with sealing(final, "2") as second, second.open("wb", buffering=0) as file:
        file.write(b"half")
        with sealing(final, "1") as first:
            first.write_bytes(b"whole")
        file.write(b", and the other half")
        assert final.read_bytes() == b"whole"
    assert final.read_bytes() == b"half, and the other half"
    assert list(tmp_path.iterdir()) == [final]


def test_an_error_leaves_nothing_behind(tmp_path):
    final = tmp_path / "shard.parquet"

    def write_and_fail():
        with sealing(final) as temp:
            temp.write_bytes(b"half")
            raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_the_sha256_is_of_the_whole_file(tmp_path):
    content = bytes(range(256)) * 40_000
    (tmp_path / "a").write_bytes(content)
    assert sha256_of(tmp_path / "a") == (hashlib.sha256(content).hexdigest(), len(content))


def test_what_is_sealed_is_durable_before_its_name_and_then_its_name(tmp_path, steps):
    final = tmp_path / "a"
    temporary(final).write_bytes(b"x")
    seal(final)
    assert list(tmp_path.iterdir()) == [final]
    assert steps == [("fsync", temporary(final)), ("rename", temporary(final)), ("fsync", tmp_path)]


def test_a_moved_file_is_durable_in_its_new_folder_first_and_may_be_moved_again(tmp_path, steps):
    source, final = tmp_path / "attempt" / "a", tmp_path / "data" / "a"
    for path in (source, final):
        path.parent.mkdir()
    source.write_bytes(b"1")
    for _ in range(2):
        move_durably(source, final)
        assert steps[-3:] == [("rename", source), ("fsync", final.parent), ("fsync", source.parent)]
    assert final.read_bytes() == b"1"
    final.unlink()
    with pytest.raises(FileNotFoundError):
        move_durably(source, final)


def test_a_new_folders_name_is_durable_before_anything_lies_in_it(tmp_path, steps):
    make_folder(tmp_path / "a" / "b")
    assert steps == [("fsync", folder) for folder in (tmp_path.parent, tmp_path, tmp_path / "a")]
    make_folder(tmp_path / "a" / "b")
    assert steps[3:] == [("fsync", tmp_path / "a")]
