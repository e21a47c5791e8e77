"""Sets of samples as sorted 16-byte hashes in memory-mapped files, so that millions take little memory.

`KnownHashes`: samples that earlier runs of a schedule have written, which the planning child does not
tokenize. `SeenHashes`: the samples of a plan so far, to find duplicates.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from schemas.dataset.columns import CONTENT_HASH_BYTES
from schemas.dataset.seal import make_folder, sealing
from schemas.digest import canonical_json
from schemas.source import Sample
from service.errors import writing

CONTENT = {"messages", "tools", "text", "token_ids", "loss_mask"}
"""The fields of a sample's content. A field that is not given is not in the hash."""
HASH = np.dtype(f"S{CONTENT_HASH_BYTES}")
Hashes = NDArray[np.bytes_]
NEWEST_HASHES = 2**18
"""How many of a plan's hashes are kept in memory, where each takes 91 bytes."""
MERGED_RATIO = 4
"""A run of hashes is merged with one up to this many times as long, so that few runs need to be searched."""


def content_hash(sample: Sample) -> bytes:
    """Return the hash of a sample's content, blake2b of its canonical JSON. The algorithm must not change."""
    content = sample.model_dump(mode="json", include=CONTENT, exclude_none=True)
    return hashlib.blake2b(canonical_json(content).encode(), digest_size=CONTENT_HASH_BYTES).digest()


def write_hashes(path: Path, parts: Iterable[bytes], attempt: str) -> None:
    """Seal a file of the hashes in `parts`, sorted. Raises DiskFull, WriteFailed."""
    with writing(f"the file {path.name}"), sealing(path, attempt) as temporary:
        with temporary.open("wb") as file:
            file.writelines(parts)
        if temporary.stat().st_size:
            hashes = np.memmap(temporary, HASH, "r+")
            hashes.sort()
            hashes.flush()


class KnownHashes:
    """The hashes in a file written by `write_hashes`, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file, unless it is empty, since an empty file cannot be mapped."""
        self._hashes = _mapped(path, "r") if path.stat().st_size else np.empty(0, HASH)

    def __contains__(self, hash_: bytes) -> bool:
        return _holds(self._hashes, hash_)


class SeenHashes:
    """The hashes added so far: the newest in memory, the others as sorted runs in unnamed files.

    The files are in `folder`, take 16 bytes per hash, and disappear with the process.
    """

    def __init__(self, folder: Path) -> None:
        """Start empty; files are written only once there are many hashes."""
        self._folder = folder
        self._newest: set[bytes] = set()
        self._runs: list[Hashes] = []

    def add(self, hash_: bytes) -> bool:
        """Add a hash; return whether it is new. Raises DiskFull, WriteFailed."""
        if hash_ in self._newest or any(_holds(run, hash_) for run in self._runs):
            return False
        self._newest.add(hash_)
        if len(self._newest) == NEWEST_HASHES:
            with writing("the hashes of the samples planned so far"):
                self._settle()
        return True

    def _settle(self) -> None:
        """Merge the newest hashes, and the runs that are not much longer, into one sorted run."""
        make_folder(self._folder)
        num_hashes = len(self._newest)
        with TemporaryFile(dir=self._folder) as file:
            file.write(b"".join(self._newest))
            while self._runs and len(self._runs[-1]) <= MERGED_RATIO * num_hashes:
                run = self._runs.pop()
                num_hashes += len(run)
                file.write(run.data)
            file.flush()
            merged = _mapped(file, "r+")
        merged.sort()
        self._runs.append(merged)
        self._newest.clear()


def _mapped(file: Path | IO[bytes], mode: Literal["r", "r+"]) -> Hashes:
    """Map a file of hashes. Searching a plain array takes half the time of a `memmap`."""
    return np.asarray(np.memmap(file, HASH, mode))


def _holds(hashes: Hashes, hash_: bytes) -> bool:
    """Search sorted hashes. The match is compared as bytes, since numpy strips a value's trailing zeros."""
    place = int(hashes.searchsorted(hash_))
    return hashes[place : place + 1].tobytes() == hash_
