"""Work that events may interrupt."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(work: Coroutine[Any, Any, T], *events: asyncio.Event) -> T | None:
    """Return the result of `work`, or None if one of `events` is set first, which cancels the work."""
    working = asyncio.create_task(work)
    tasks = [working, *(asyncio.create_task(event.wait()) for event in events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
