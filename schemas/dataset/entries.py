"""The entries of a dataset's files, as in the database, over HTTP and in the manifest."""

import hashlib

from pydantic import Field

from schemas.base import Count, Wire
from schemas.names import MAX_UNITS


class FileEntry(Wire):
    """A file of the dataset: its path inside the repository, and the digest and number of its bytes."""

    path: str
    sha256: str
    bytes: Count


def entry_of(path: str, content: bytes) -> FileEntry:
    """Return the entry of a small file with this content."""
    return FileEntry(path=path, sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


class LayerStats(Wire):
    """Statistics of one layer over a shard.

    The largest magnitude, and the mean over sampled tokens of the root mean square over H.
    """

    layer_id: Count
    mean_rms: float = Field(ge=0)
    max_abs: float = Field(ge=0)


class ShardEntry(FileEntry):
    """A committed shard. Its hashes cover the bytes that its rows were proven on; `xxh3` is xxh3_128."""

    xxh3: str = Field(pattern=r"^[0-9a-f]{32}$")
    rows: int = Field(gt=0, lt=2**63)
    tokens: int = Field(gt=0, lt=2**63)
    unit: int = Field(ge=0, lt=MAX_UNITS)
    epoch: Count
    layers: tuple[LayerStats, ...]
