"""Which samples earlier runs of a schedule have written: keys of their contents, sorted in a file.

The planning child maps the file and asks it before it tokenizes.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from schemas.dataset.columns import KEY_BYTES
from schemas.dataset.seal import sealing
from schemas.digest import canonical_json
from schemas.request import Sample
from service.errors import writing

CONTENT = {"messages", "tools", "text", "token_ids", "loss_mask"}
"""What a sample is apart from its name. A field that is not given is not in its key."""
KEY = np.dtype(f"S{KEY_BYTES}")


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
        self._keys = np.memmap(path, KEY, "r") if path.stat().st_size else np.empty(0, KEY)

    def __contains__(self, key: bytes) -> bool:
        """Say whether the key is there; only numpy compares keys rightly that end in zero bytes."""
        return bool(self._keys.searchsorted(key, "left") < self._keys.searchsorted(key, "right"))
