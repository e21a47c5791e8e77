"""Runs vLLM's start, which takes minutes, in a thread, so that it can be cut short.

vLLM has no API for that: its core reacts to a signal only once it has loaded the model. So the processes
started meanwhile are killed, and the thread that waits for them ends with vLLM's own error. Nothing is lost:
no row is captured before an engine has started.
"""

import asyncio
import logging
import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import psutil

logger = logging.getLogger(__name__)

OUR_CHILDREN = "quarry-"
"""Prefix of the names of this process's own children."""
POLL_S = 0.1

T = TypeVar("T")


class VllmStart(Generic[T]):
    """One call of `build` in a thread. Used from one event loop."""

    def __init__(self, build: Callable[[], T]) -> None:
        """Start `build` at once."""
        self._before = {child.pid for child in multiprocessing.active_children()}
        self._building = asyncio.ensure_future(asyncio.to_thread(build))

    async def built(self) -> T:
        """Wait for the result of `build`; raise what it raises. Cancellation does not end the thread."""
        return await asyncio.shield(self._building)

    async def end(self) -> T | None:
        """End the start and wait until it has ended; return the result if it was built anyway."""
        while not self._building.done():
            for child in multiprocessing.active_children():
                if child.pid not in self._before and not child.name.startswith(OUR_CHILDREN):
                    logger.info("ending the start of %s", child.name)
                    _kill_tree(child.pid)
            await asyncio.wait({self._building}, timeout=POLL_S)
        return None if self._building.exception() else self._building.result()


def _kill_tree(pid: int | None) -> None:
    """Kill a process and all its descendants; some may end meanwhile."""
    assert pid is not None, "an active child has been started"  # noqa: S101 - None would be this process
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*root.children(recursive=True), root):
            with suppress(psutil.NoSuchProcess):
                process.kill()
