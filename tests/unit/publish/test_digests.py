"""The sha256 of shards: taken once, of the bytes that were sealed, or the dataset is not made whole."""

from pathlib import Path

import pytest

from schemas.dataset.manifest import SealedShard
from schemas.dataset.seal import sha256_of
from service.errors import DatasetBroken
from service.publish.digests import shard_entries
from tests.support.parquet import xxh3_of


def a_shard(folder: Path, unit: int, content: bytes) -> SealedShard:
    path = f"train-{unit:05d}.parquet"
    (folder / path).write_bytes(content)
    return SealedShard(
        path=path,
        bytes=len(content),
        xxh3=xxh3_of(folder / path),
        rows=1,
        tokens=2,
        unit=unit,
        epoch=1,
        layers=(),
    )


def test_every_shard_gets_the_sha256_of_its_file_in_order(tmp_path: Path) -> None:
    shards = [a_shard(tmp_path, unit, bytes([unit]) * (10_000_000 * (3 - unit))) for unit in range(4)]
    entries = shard_entries(tmp_path, shards, {})
    assert [entry.path for entry in entries] == [shard.path for shard in shards]
    for entry in entries:
        assert (entry.sha256, entry.bytes) == sha256_of(tmp_path / entry.path)


def test_a_file_that_changed_since_its_seal_is_named(tmp_path: Path) -> None:
    shard = a_shard(tmp_path, 0, b"states")
    (tmp_path / shard.path).write_bytes(b"stated")
    with pytest.raises(DatasetBroken, match=f"{shard.path} has xxh3 .*, {shard.xxh3} was sealed"):
        shard_entries(tmp_path, [shard], {})
    (tmp_path / shard.path).write_bytes(b"state")
    with pytest.raises(DatasetBroken, match="has 5 bytes, 6 were committed"):
        shard_entries(tmp_path, [shard], {})
    (tmp_path / shard.path).unlink()
    with pytest.raises(DatasetBroken, match="is missing"):
        shard_entries(tmp_path, [shard], {})


def test_what_an_earlier_manifest_holds_of_the_same_seal_is_not_read_again(tmp_path: Path) -> None:
    shards = [a_shard(tmp_path, unit, b"%d" % unit) for unit in range(2)]
    known = {entry.path: entry for entry in shard_entries(tmp_path, shards, {})}
    again = a_shard(tmp_path, 1, b"captured again")
    (tmp_path / shards[0].path).unlink()
    entries = shard_entries(tmp_path, [shards[0], again], known)
    assert entries[0] == known[shards[0].path]
    assert entries[1].sha256 == sha256_of(tmp_path / again.path)[0]


def test_it_can_be_stopped_between_files(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        shard_entries(tmp_path, [a_shard(tmp_path, 0, b"x")], {}, stop)
