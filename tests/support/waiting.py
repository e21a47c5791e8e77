"""Waiting for what other threads and processes do. A wait that fails says so after its patience."""

import asyncio
import time
from collections.abc import Callable


async def until(happened: Callable[[], bool], *, patience_s: float = 60.0, poll_s: float = 0.001) -> None:
    """Wait until something in another process or thread is seen to have happened."""
    async with asyncio.timeout(patience_s):
        while not happened():
            await asyncio.sleep(poll_s)


def wait_until(
    happened: Callable[[], bool],
    otherwise: str = "it did not happen in time",
    *,
    patience_s: float = 60.0,
    poll_s: float = 0.02,
) -> None:
    """Wait as `until` does, in a thread without a loop; fail with `otherwise`."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(poll_s)
