"""Work that signals may interrupt, and work whose first error ends the rest."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Run = Coroutine[Any, Any, T]


async def unless(work: Run[T], *signals: Run[object]) -> T | None:
    """Return the result of `work`, or None if one of `signals` ends first, which cancels the work."""
    working = asyncio.create_task(work)
    tasks = [working, *map(asyncio.create_task, signals)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def together(runs: Iterable[Run[None]]) -> None:
    """Run all at once, begun in their order; if one fails, end the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
