"""The service's end of the connector's socket: opens units, collects receipts, notices a vanished engine.

Listens on a Unix socket in a folder of its own (mode 0700), whose path is passed to the connector in the
engine's start options. There is one connection per rank. Everything here runs on the worker's event loop.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

from schemas.names import shard_file
from schemas.receipts import (
    FROM_CONNECTOR,
    AbandonUnit,
    AskLoad,
    AttemptId,
    Hello,
    OpenUnit,
    RankLoad,
    Refused,
    SkipRow,
    ToConnector,
    UnitFailed,
    UnitOpened,
    UnitSealed,
    line,
)
from service.errors import EngineDied, EngineStuck
from service.work.meters import LOADS

logger = logging.getLogger(__name__)

LINE_BYTES = 64 * 2**20
"""The longest line: a receipt of a unit with 65,536 rows is a few megabytes."""

OPEN_TIMEOUT_S = 600.0
"""How long a rank may take to open a unit: its writer first finishes the row that it is writing."""

ASK_S = 1.0

Receipt = UnitSealed | UnitFailed


class _Attempt:
    """What is awaited for one open attempt: every rank's readiness, then every rank's receipt."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.opened: set[int] = set()
        self.receipts: dict[int, Receipt] = {}
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[tuple[Receipt, ...]] = loop.create_future()

    def fail(self, error: EngineDied) -> None:
        for future in (self.ready, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: only one of the two is awaited


class EngineLink:
    """All connections to one engine's connector workers."""

    def __init__(self) -> None:
        """Make the socket's folder; `listen` binds it.

        Unix paths are short, so the folder is a temporary one.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="quarry-"))
        self.path = self._folder / "engine.sock"
        self.failure_path = self._folder / "failure"
        """Where a process of the engine writes the error of which it dies."""
        self._server: asyncio.Server | None = None
        self._streams: dict[int, asyncio.StreamWriter] = {}
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._hellos: dict[int, Hello] = {}
        self._complete = asyncio.Event()
        """Set once every rank has connected."""
        self._lost: EngineDied | None = None
        self.refusal: str | None = None
        """Why the connector refuses the engine, if it does."""

    @property
    def alive(self) -> bool:
        """Return whether every connection that was made is still open."""
        return self._lost is None

    def failure(self) -> str | None:
        """Return the error of which a process of the engine died, if it wrote one."""
        with contextlib.suppress(OSError):
            return self.failure_path.read_text("utf-8", "replace") or None
        return None

    async def listen(self) -> None:
        """Start accepting connections from connector workers."""
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=LINE_BYTES)

    async def hello(self, timeout_s: float) -> tuple[Hello, ...]:
        """Return every rank's greeting, by rank.

        Raises EngineDied if they do not all arrive in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError as error:
            raise EngineDied(f"the engine's connector did not come up within {timeout_s:.0f} s") from error
        return tuple(self._hellos[rank] for rank in sorted(self._hellos))

    async def open(self, order: OpenUnit, timeout_s: float = OPEN_TIMEOUT_S) -> None:
        """Open an attempt on every rank and wait until they are ready.

        Raises EngineDied, and EngineStuck if a rank does not answer in time.
        """
        if self._lost is not None:
            raise self._lost
        attempt = self._attempts[order.attempt_id] = _Attempt(len(self._streams))
        await self._send(order)
        try:
            # Not `wait_for`: before Python 3.12 it swallows a cancellation that arrives with the answer.
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(attempt.ready)
        except TimeoutError as error:
            raise EngineStuck(f"a writer did not open {order.attempt_id} within {timeout_s:.0f} s") from error

    async def skip(self, attempt_id: AttemptId, row: int) -> None:
        """Tell every rank that `row` will not reach the engine."""
        await self._send(SkipRow(attempt_id=attempt_id, row=row))

    async def abandon(self, attempt_id: AttemptId) -> None:
        """Forget an attempt; harmless if every rank has already ended it."""
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is not None:
            attempt.fail(EngineDied("the attempt was abandoned"))
            await self._send(AbandonUnit(attempt_id=attempt_id))

    async def receipts(self, attempt_id: AttemptId) -> tuple[Receipt, ...]:
        """Wait for all ranks' receipts, or one of a failure; return them in rank order. Raises EngineDied.

        An attempt that a rank still has open is kept until it is abandoned, also if the wait was cancelled.
        """
        attempt = self._attempts[attempt_id]
        try:
            return await asyncio.shield(attempt.ended)
        finally:
            if len(attempt.receipts) == attempt.num_ranks:
                self._attempts.pop(attempt_id, None)

    async def ask_loads(self) -> None:
        """Ask each rank once a second for its load and totals; the answers are in `LOADS`."""
        while True:
            await self._send(AskLoad())
            await asyncio.sleep(ASK_S)

    async def close(self) -> None:
        """Stop listening and close the connections."""
        if self._server is not None:
            self._server.close()
        for stream in self._streams.values():
            stream.close()
        self._lose(EngineDied("the engine was stopped"))
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, message: ToConnector) -> None:
        for stream in list(self._streams.values()):
            # A broken connection is noticed by its reader, which fails every attempt.
            with contextlib.suppress(ConnectionError):
                stream.write(line(message))
                await stream.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            if _user_of(writer) != os.getuid():
                logger.warning("another user's process on the engine's socket was turned away")
                return
            async for text in reader:
                message = FROM_CONNECTOR.validate_json(text)
                if isinstance(message, Refused):
                    self.refusal = message.detail
                elif not isinstance(message, Hello):
                    self._take(message, rank)
                elif message.rank in self._hellos:
                    logger.warning("a second hello of rank %d was turned away", message.rank)
                    return
                else:
                    self._greet(message)
                    rank = message.rank
                    self._streams[rank] = writer
                    if len(self._hellos) == message.num_ranks:
                        self._complete.set()
        except (ConnectionError, ValueError) as error:
            self._lose(EngineDied(f"the socket to the engine broke: {error}"))
        finally:
            writer.close()
            if rank is not None:
                self._streams.pop(rank, None)
                why = self.failure() or "without an error of its own"
                self._lose(EngineDied(f"rank {rank} of the engine went away: {why}"))

    def _greet(self, hello: Hello) -> None:
        counts = {hello.num_ranks, *(earlier.num_ranks for earlier in self._hellos.values())}
        if len(counts) > 1 or not 0 <= hello.rank < hello.num_ranks:
            raise ValueError(f"rank {hello.rank} of {hello.num_ranks} connected beside ranks of {counts}")
        self._hellos[hello.rank] = hello

    def _take(self, message: UnitOpened | Receipt | RankLoad, speaker: int | None) -> None:
        if message.rank != speaker:
            raise ValueError(f"rank {speaker} speaks for rank {message.rank}")
        if isinstance(message, RankLoad):
            if self.alive:
                LOADS[message.rank] = message
            return
        attempt_id = message.attempt_id
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return
        if isinstance(message, UnitSealed) and message.file is not None:
            name = shard_file(attempt_id.unit, message.rank, attempt.num_ranks)
            if message.file != name:
                raise ValueError(f"the receipt of {name} names the file {message.file!r}")
        if isinstance(message, UnitOpened):
            attempt.opened.add(message.rank)
        else:
            attempt.receipts[message.rank] = message
        # A rank that could not open the unit has answered, too: its receipt says why.
        if len(attempt.opened | attempt.receipts.keys()) == attempt.num_ranks and not attempt.ready.done():
            attempt.ready.set_result(None)
        failed = isinstance(message, UnitFailed)
        if (failed or len(attempt.receipts) == attempt.num_ranks) and not attempt.ended.done():
            attempt.ended.set_result(tuple(attempt.receipts[rank] for rank in sorted(attempt.receipts)))

    def _lose(self, error: EngineDied) -> None:
        if self._lost is None:
            self._lost = error
        for attempt in self._attempts.values():
            attempt.fail(error)


def _user_of(writer: asyncio.StreamWriter) -> int:
    """Return the user id of the process at the other end of a connection, as recorded by the kernel."""
    connection: socket.socket = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
