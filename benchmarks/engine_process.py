"""One engine in a process of its own, kept through all rounds, stopped by signal while another one runs.

A stopped engine takes no CPU; one that merely waits spins for a second after its last step.
"""

import asyncio
import multiprocessing
import os
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

import psutil

from benchmarks.catalog import ROWS
from benchmarks.meter import TreeMeter, tree
from benchmarks.report import EngineTurn

if TYPE_CHECKING:
    from benchmarks.rows.contract import Site

START_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL_LINES = 15

Order = tuple[Literal["prepare", "measure", "clean"], str, int]
"""What the benchmark asks of the process, for which row in which round; the end of the pipe ends it."""


class EngineLost(RuntimeError):
    """The engine process ended or did not answer; the message holds the end of its log."""


class EngineProcess:
    """The benchmark's handle on one engine."""

    def __init__(self, name: str, site: "Site") -> None:
        """Name the engine (a key of `benchmarks.rows.engines.ENGINES`); nothing runs before `start`."""
        site.folder.mkdir(parents=True)
        self.name = name
        self._work = site.work
        self._log = site.folder / "engine.log"
        context = multiprocessing.get_context("spawn")
        self._orders, self._theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(name, site, self._theirs), name=f"bench-{name}")

    def start(self) -> None:
        """Start the engine, wait until it is up, and stop it by signal. Raises EngineLost."""
        self._process.start()
        self._theirs.close()
        self._receive(START_TIMEOUT_S)
        self._suspend()

    def run(self, row: str, turn: int) -> EngineTurn:
        """Wake the engine, let one row work once, measure that, and stop the engine again by signal.

        Raises EngineLost, also where the row left fewer bytes than the states have.
        """
        self._resume()
        self._ask(("prepare", row, turn))
        # Dirty pages of whoever wrote before would be written back at this row's expense.
        os.sync()
        with TreeMeter(self._pid) as meter:
            seconds, answered_s = self._ask(("measure", row, turn))
        written = self._ask(("clean", row, turn))
        self._suspend()
        least = ROWS[row].least_stored * self._work.state_bytes
        if written.bytes < least:
            raise EngineLost(f"row {row!r} left {written.bytes} bytes of states, less than {least:.0f}")
        return EngineTurn(
            seconds, answered_s, meter.cpu_s, meter.peak_rss_bytes, written.files, written.bytes
        )

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
        return EngineLost(f"the engine {self.name!r} {what}. The end of its log:\n{tail}")

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


def _main(name: str, site: "Site", orders: "Connection[Any, Order]") -> None:
    """Serve one engine until the pipe ends; whatever it says goes to its log."""
    with site.folder.joinpath("engine.log").open("ab") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    asyncio.run(_serve(name, site, orders))


async def _serve(name: str, site: "Site", orders: "Connection[Any, Order]") -> None:
    from benchmarks.rows.engines import ENGINES

    engine = ENGINES[name](site)
    try:
        await engine.start()
        orders.send(None)
        while True:
            try:
                order = await asyncio.to_thread(orders.recv)
            except EOFError:
                return
            row = engine.rows[order[1]]
            match order:
                case ("prepare", _, turn):
                    await row.prepare(turn)
                    orders.send(None)
                case ("measure", _, _):
                    begin = time.perf_counter()
                    answered = await row.measure()
                    orders.send((time.perf_counter() - begin, answered - begin))
                case ("clean", _, _):
                    orders.send(await row.clean())
    finally:
        await engine.stop()
