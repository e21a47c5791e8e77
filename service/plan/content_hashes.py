"""Sets of samples by their hashes of 16 bytes, sorted in mapped files, so that millions take little memory.

`KnownHashes`: what earlier runs of a schedule have written. The planning child asks it before it tokenizes.
`SeenHashes`: what a plan has so far, by which a duplicate is found.
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
"""What a sample is apart from its name. A field that is not given is not in its hash."""
HASH = np.dtype(f"S{CONTENT_HASH_BYTES}")
Hashes = NDArray[np.bytes_]
NEWEST_HASHES = 2**18
"""Of a plan, kept in memory, where each takes 91 bytes."""
MERGED_RATIO = 4
"""A run of hashes is merged with one that is up to so many times as long: few runs are left to search."""


def content_hash(sample: Sample) -> bytes:
    """Return the hash of a sample's content, which must never change: blake2b over its canonical JSON."""
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
    """The hashes in a file that `write_hashes` made, mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file; an empty one cannot be."""
        self._hashes = _mapped(path, "r") if path.stat().st_size else np.empty(0, HASH)

    def __contains__(self, hash_: bytes) -> bool:
        """Say whether the hash is there."""
        return _holds(self._hashes, hash_)


class SeenHashes:
    """The hashes that were added: the newest in memory, the others as sorted runs in files without a name.

    The files are in `folder`, 16 bytes each, and end with the process.
    """

    def __init__(self, folder: Path) -> None:
        """Write nothing before there are many hashes."""
        self._folder = folder
        self._newest: set[bytes] = set()
        self._runs: list[Hashes] = []

    def add(self, hash_: bytes) -> bool:
        """Add a hash; say whether it was not there. Raises DiskFull, WriteFailed."""
        if hash_ in self._newest or any(_holds(run, hash_) for run in self._runs):
            return False
        self._newest.add(hash_)
        if len(self._newest) == NEWEST_HASHES:
            with writing("the hashes of the samples planned so far"):
                self._settle()
        return True

    def _settle(self) -> None:
        """Sort the newest hashes, and the runs that are not much longer, into one run."""
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
    """Map a file of hashes. As a plain array it is searched in half the time of a `memmap`."""
    return np.asarray(np.memmap(file, HASH, mode))


def _holds(hashes: Hashes, hash_: bytes) -> bool:
    """Search sorted hashes. They are compared as bytes: numpy takes zero bytes off the end of a value."""
    place = int(hashes.searchsorted(hash_))
    return hashes[place : place + 1].tobytes() == hash_
