"""Work that events may end before it is done."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(work: Coroutine[Any, Any, T], *events: asyncio.Event) -> T | None:
    """Return what `work` returns; none if one of `events` is set before, which ends the work."""
    working = asyncio.create_task(work)
    tasks = [working, *(asyncio.create_task(event.wait()) for event in events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
