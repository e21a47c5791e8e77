"""Sets of samples by their keys of 16 bytes, sorted in mapped files, so that millions take little memory.

`KnownKeys`: what earlier runs of a schedule have written. The planning child asks it before it tokenizes.
`SeenKeys`: what a plan has so far, by which a duplicate is found.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from schemas.dataset.columns import KEY_BYTES
from schemas.dataset.seal import make_folder, sealing
from schemas.digest import canonical_json
from schemas.request import Sample
from service.errors import writing

CONTENT = {"messages", "tools", "text", "token_ids", "loss_mask"}
"""What a sample is apart from its name. A field that is not given is not in its key."""
KEY = np.dtype(f"S{KEY_BYTES}")
Keys = NDArray[np.bytes_]
NEWEST_KEYS = 2**18
"""Of a plan, kept in memory, where each takes 91 bytes."""
MERGED_RATIO = 4
"""A run of keys is merged with one that is up to so many times as long: few runs are left to search."""


def content_key(sample: Sample) -> bytes:
    """Return the key of a sample's content, which must never change: blake2b over its canonical JSON."""
    content = sample.model_dump(mode="json", include=CONTENT, exclude_none=True)
    return hashlib.blake2b(canonical_json(content).encode(), digest_size=KEY_BYTES).digest()


def write_keys(path: Path, parts: Iterable[bytes], attempt: str) -> None:
    """Seal a file of the keys in `parts`, sorted. Raises DiskFull, WriteFailed."""
    with writing(f"the file {path.name}"), sealing(path, attempt) as temporary:
        with temporary.open("wb") as file:
            file.writelines(parts)
        if temporary.stat().st_size:
            keys = np.memmap(temporary, KEY, "r+")
            keys.sort()
            keys.flush()


class KnownKeys:
    """The keys in a file that `write_keys` made, mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file; an empty one cannot be."""
        self._keys = _mapped(path, "r") if path.stat().st_size else np.empty(0, KEY)

    def __contains__(self, key: bytes) -> bool:
        """Say whether the key is there."""
        return _holds(self._keys, key)


class SeenKeys:
    """The keys that were added: the newest in memory, the others as sorted runs in files without a name.

    The files are in `folder`, 16 bytes a key, and end with the process.
    """

    def __init__(self, folder: Path) -> None:
        """Write nothing before there are many keys."""
        self._folder = folder
        self._newest: set[bytes] = set()
        self._runs: list[Keys] = []

    def add(self, key: bytes) -> bool:
        """Add a key; say whether it was not there. Raises DiskFull, WriteFailed."""
        if key in self._newest or any(_holds(run, key) for run in self._runs):
            return False
        self._newest.add(key)
        if len(self._newest) == NEWEST_KEYS:
            with writing("the keys of the samples planned so far"):
                self._settle()
        return True

    def _settle(self) -> None:
        """Sort the newest keys, and the runs that are not much longer, into one run."""
        make_folder(self._folder)
        num_keys = len(self._newest)
        with TemporaryFile(dir=self._folder) as file:
            file.write(b"".join(self._newest))
            while self._runs and len(self._runs[-1]) <= MERGED_RATIO * num_keys:
                run = self._runs.pop()
                num_keys += len(run)
                file.write(run.data)
            file.flush()
            merged = _mapped(file, "r+")
        merged.sort()
        self._runs.append(merged)
        self._newest.clear()


def _mapped(file: Path | IO[bytes], mode: Literal["r", "r+"]) -> Keys:
    """Map a file of keys. As a plain array it is searched in half the time of a `memmap`."""
    return np.asarray(np.memmap(file, KEY, mode))


def _holds(keys: Keys, key: bytes) -> bool:
    """Search sorted keys. As bytes they are compared whole: numpy takes zero bytes off the end of a value."""
    place = int(keys.searchsorted(key))
    return keys[place : place + 1].tobytes() == key
