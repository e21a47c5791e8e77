"""The sha256 of every shard, which the Hub asks for, taken when a finished dataset is made whole.

It is the most costly pass over the states by far, and nothing needs it sooner, so the engine's machine is
spared it while it captures. The bytes are held against the seal's xxh3 in the same pass.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from schemas.dataset.files import PIECE_BYTES, DirectReader
from schemas.dataset.manifest import SealedShard, ShardEntry
from service.errors import DatasetBroken

MAX_THREADS = 8
"""Each hashes a file by itself, at the speed of a core, until the disk is the bound."""


def shard_entries(
    dataset: Path,
    shards: Sequence[SealedShard],
    known: Mapping[str, ShardEntry],
    check: Callable[[], None] = lambda: None,
) -> tuple[ShardEntry, ...]:
    """Return the manifest's entries of `shards`, in their order.

    Args:
        dataset: the folder that they stand in.
        shards: what was committed.
        known: entries of an earlier manifest of the same job, by path; what has not changed since is not
            read again.
        check: called between files; it may raise.

    Raises DatasetBroken for a file that is missing or other than what was sealed, OSError.
    """
    threads = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    try:
        entries = []
        for entry in threads.map(lambda shard: _entry(dataset, shard, known.get(shard.path)), shards):
            entries.append(entry)
            check()
    finally:
        # After an error, what has not begun never does.
        threads.shutdown(cancel_futures=True)
    return tuple(entries)


def _entry(dataset: Path, shard: SealedShard, known: ShardEntry | None) -> ShardEntry:
    if known is not None and known == ShardEntry(**shard.model_dump(), sha256=known.sha256):
        return known
    sha256 = hashlib.sha256()
    try:
        with closing(DirectReader(dataset / shard.path)) as file:
            if file.num_bytes != shard.bytes:
                raise DatasetBroken(f"{shard.path} has {file.num_bytes} bytes, {shard.bytes} were committed")
            while file.position < file.num_bytes:
                sha256.update(file.upto(min(file.position + PIECE_BYTES, file.num_bytes)).data)
            xxh3 = file.rest()
    except FileNotFoundError as error:
        raise DatasetBroken(f"{shard.path} is missing") from error
    except EOFError as error:
        raise DatasetBroken(f"{shard.path}: {error}") from error
    if xxh3 != shard.xxh3:
        raise DatasetBroken(f"{shard.path} has xxh3 {xxh3}, {shard.xxh3} was sealed")
    return ShardEntry(**shard.model_dump(), sha256=sha256.hexdigest())
