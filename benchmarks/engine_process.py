"""One engine row in a process of its own, kept through all rounds, stopped by signal while another row runs.

A stopped engine takes no CPU; one that merely waits spins for a second after its last step.
"""

import asyncio
import multiprocessing
import os
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from benchmarks.meter import TreeMeter, tree
from benchmarks.turns import EngineTurn
from benchmarks.workload import Workload

START_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 15

Order = tuple[Literal["prepare"], int] | tuple[Literal["measure", "clean"], None]
"""What the benchmark asks of the process; the end of the pipe ends it."""


class EngineLost(RuntimeError):
    """The engine process ended or did not answer; the message holds the end of its log."""


class EngineProcess:
    """The benchmark's handle on one engine row."""

    def __init__(self, kind: str, work: Workload, weights: Path, folder: Path) -> None:
        """Name the row's `kind` (a key of `benchmarks.rows.ROWS`); nothing runs before `start`."""
        folder.mkdir(parents=True)
        self.kind = kind
        self._log = folder / "engine.log"
        context = multiprocessing.get_context("spawn")
        self._orders, self._theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(kind, work, weights, folder, self._log, self._theirs), name=f"bench-{kind}"
        )

    def start(self) -> None:
        """Start the engine, wait until it is up, and stop it by signal. Raises EngineLost."""
        self._process.start()
        self._theirs.close()
        self._receive(START_TIMEOUT_S)
        self._suspend()

    def run(self, turn: int) -> EngineTurn:
        """Wake the engine, let it work once, measure that, and stop it again by signal. Raises EngineLost."""
        self._resume()
        self._ask(("prepare", turn))
        # Dirty pages of whoever wrote before would be written back at this row's expense.
        os.sync()
        with TreeMeter(self._pid) as meter:
            seconds = self._ask(("measure", None))
        written = self._ask(("clean", None))
        self._suspend()
        return EngineTurn(seconds, meter.cpu_s, meter.peak_rss_bytes, written.files, written.bytes)

    def stop(self) -> None:
        """End the engine; harmless when it is already gone."""
        if self._process.pid is None:
            return
        started = self._resume()
        if self._process.is_alive():
            # Closing the pipe is the order to end, also for a process that is in the middle of something.
            self._orders.close()
            self._process.join(STOP_TIMEOUT_S)
        for process in started:
            if process.is_running():
                process.kill()
        self._process.join()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None, "start() comes first"
        return self._process.pid

    def _ask(self, order: Order) -> Any:  # noqa: ANN401 - each order has its own answer
        try:
            self._orders.send(order)
        except OSError as error:
            raise self._lost("ended") from error
        return self._receive(TURN_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:  # noqa: ANN401
        try:
            if not self._orders.poll(timeout_s):
                raise self._lost(f"did not answer within {timeout_s:.0f} s")
            return self._orders.recv()
        except (EOFError, OSError) as error:
            raise self._lost("ended") from error

    def _lost(self, what: str) -> EngineLost:
        with self._log.open(errors="replace") as log:
            tail = "".join(deque(log, LOG_TAIL_LINES))
        return EngineLost(f"the engine of row {self.kind!r} {what}. The end of its log:\n{tail}")

    def _suspend(self) -> None:
        for process in tree(self._pid):
            process.suspend()

    def _resume(self) -> list[psutil.Process]:
        """Wake the tree and return it; empty if it is gone."""
        try:
            processes = tree(self._pid)
            for process in processes:
                process.resume()
        except psutil.NoSuchProcess:
            return []
        return processes


def _main(
    kind: str, work: Workload, weights: Path, folder: Path, log: Path, orders: "Connection[Any, Order]"
) -> None:
    """Serve one row until the pipe ends; whatever the engine says goes to `log`."""
    with log.open("ab") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    asyncio.run(_serve(kind, work, weights, folder, orders))


async def _serve(
    kind: str, work: Workload, weights: Path, folder: Path, orders: "Connection[Any, Order]"
) -> None:
    from benchmarks.rows import ROWS

    row = ROWS[kind](work, weights, folder)
    try:
        await row.start()
        orders.send(None)
        while True:
            try:
                order = await asyncio.to_thread(orders.recv)
            except EOFError:
                return
            match order:
                case ("prepare", int(turn)):
                    await row.prepare(turn)
                    orders.send(None)
                case ("measure", _):
                    orders.send(await row.measure())
                case ("clean", _):
                    orders.send(await row.clean())
    finally:
        await row.stop()
