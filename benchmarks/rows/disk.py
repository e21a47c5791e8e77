"""The disk alone: the bytes of a round's states written, made durable and read back, by no engine."""

import asyncio
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.rows.contract import Row, Site, Written, removed
from schemas.dataset.direct import DirectWriter
from schemas.dataset.files import LocalFile
from schemas.dataset.memory import page_aligned
from schemas.dataset.seal import fsync

CHUNK = 2**22
"""Bytes of a write: a layer of a row of 512 tokens of an 8B model."""


class DiskEngine:
    """No engine: threads that write."""

    def __init__(self, site: Site) -> None:
        """Serve the one row."""
        self.rows: Mapping[str, Row] = {"disk": DiskRow(site)}

    async def start(self) -> None:
        """Start nothing."""

    async def stop(self) -> None:
        """Stop nothing."""


class DiskRow:
    """A file a unit, as many at once as the connector has writers; done when all are read back."""

    def __init__(self, site: Site) -> None:
        """Write below the site's folder."""
        self._folder = site.folder / "files"
        self._files = site.work.num_units
        self._chunks = -(-site.work.state_bytes // self._files // CHUNK)
        self._threads = site.settings().writers()
        self._chunk = page_aligned(CHUNK)
        self._chunk[:] = np.frombuffer(os.urandom(CHUNK), np.uint8)

    async def prepare(self, turn: int) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)

    async def measure(self) -> float:
        """Write every file."""
        with ThreadPoolExecutor(self._threads) as threads:
            paths = [self._folder / f"{number}.bin" for number in range(self._files)]
            await asyncio.gather(
                *(asyncio.get_running_loop().run_in_executor(threads, self._write, path) for path in paths)
            )
        return time.perf_counter()

    async def clean(self) -> Written:
        """Delete the files."""
        return removed(self._folder, "*.bin")

    def _write(self, path: Path) -> None:
        with closing(DirectWriter(path)) as file:
            for _ in range(self._chunks):
                file.write(self._chunk.data)
            file.end()
        fsync(path)
        with closing(LocalFile(path, direct=True)) as written:
            for number in range(self._chunks):
                written.read(number * CHUNK, CHUNK)
