"""A start that is ended takes all its processes with it, and nobody else's."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from service.capture.vllm_start import VllmStart
from tests.support.children import wait_for_end

SPAWN = multiprocessing.get_context("spawn")


def core(told: Connection) -> None:
    """Start a process, tell both numbers, and go on for ever; deaf to SIGTERM, as vLLM's core is then."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    told.send((os.getpid(), worker.pid))
    signal.pause()


def started(name: str) -> tuple[BaseProcess, list[int]]:
    """Start a core; return it with the numbers of its processes."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=core, args=(theirs,), name=name)
    process.start()
    return process, list(ours.recv())


@pytest.fixture
def keeper() -> Iterator[Callable[[str], tuple[BaseProcess, list[int]]]]:
    """Return what starts a core that is killed in the end, whatever becomes of it."""
    every: list[tuple[BaseProcess, list[int]]] = []

    def start(name: str) -> tuple[BaseProcess, list[int]]:
        every.append(started(name))
        return every[-1]

    yield start
    for process, (_, worker) in every:
        process.kill()
        process.join()
        if Path(f"/proc/{worker}").exists():
            os.kill(worker, signal.SIGKILL)


def test_a_start_that_is_ended_leaves_no_process(keeper):
    """1. One process runs before. 2. A start waits for another, and the planner dies and comes back. 3. It is
    cancelled, then ended."""
    before, _ = keeper("before")
    numbers: list[int] = []

    def build() -> None:
        process, told = keeper("EngineCore")
        keeper("quarry-planner")
        numbers.extend(told)
        process.join()
        raise RuntimeError("Engine core initialization failed")

    async def ended() -> object:
        start: VllmStart[None] = VllmStart(build)
        waiting = asyncio.create_task(start.built())
        while not numbers:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        return await asyncio.wait_for(start.end(), 60)

    assert asyncio.run(ended()) is None
    for number in numbers:
        wait_for_end(number)
    alive = {child.name for child in multiprocessing.active_children()}
    assert {"before", "quarry-planner"} <= alive
    assert "EngineCore" not in alive
    assert before.is_alive()


def test_what_was_built_all_the_same_is_returned():
    async def built() -> tuple[str, str | None]:
        start = VllmStart(lambda: "engine")
        return await start.built(), await start.end()

    assert asyncio.run(built()) == ("engine", "engine")


def test_a_start_that_failed_says_so_once():
    def build() -> None:
        raise ValueError("no such model")

    async def failed() -> None:
        start = VllmStart(build)
        with pytest.raises(ValueError, match="no such model"):
            await start.built()
        assert await start.end() is None

    asyncio.run(failed())
