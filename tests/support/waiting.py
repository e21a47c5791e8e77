"""Waiting for what other threads and processes do. A wait that fails says so after its patience."""

import asyncio
import time
from collections.abc import Callable

LATE = 0.05
"""A wait may end later by this share of its length: looking often takes a core from what is waited for."""


async def until(
    happened: Callable[[], bool], *, patience_s: float = 200.0, poll_s: float | None = None
) -> None:
    """Wait until something in another process or thread is seen to have happened."""
    begun_s = time.monotonic()
    async with asyncio.timeout(patience_s):
        while not happened():
            growing_s = min(0.001 + LATE * (time.monotonic() - begun_s), 0.5)
            await asyncio.sleep(growing_s if poll_s is None else poll_s)


def wait_until(
    happened: Callable[[], bool],
    otherwise: str = "it did not happen in time",
    *,
    patience_s: float = 200.0,
) -> None:
    """Wait as `until` does, in a thread without a loop; fail with `otherwise`."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
