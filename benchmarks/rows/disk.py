"""The disk alone: the bytes of a round's states written and made durable, by no engine."""

import asyncio
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.rows.contract import Row, Site, Written, removed

CHUNK = 2**22
"""Bytes of a `write()`: a row of an 8B model's states has about four times as many."""


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
    """A file a unit, as many at once as the connector has writers. Done when all are durable."""

    def __init__(self, site: Site) -> None:
        """Write below the site's folder."""
        self._folder = site.folder / "files"
        self._files = site.work.num_units
        self._file_bytes = site.work.state_bytes // self._files + 1
        self._threads = site.settings().writers()
        self._chunk = os.urandom(CHUNK)

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
        with path.open("wb", buffering=0) as file:
            left = self._file_bytes
            while left:
                left -= file.write(self._chunk[:left])
            os.fsync(file.fileno())
