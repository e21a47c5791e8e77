"""The service's end of the socket, against connectors that the test plays."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from schemas.receipts import (
    TO_CONNECTOR,
    AbandonUnit,
    AskLoad,
    FromConnector,
    Hello,
    RankLoad,
    SkipRow,
    ToConnector,
    UnitFailed,
    UnitOpened,
    UnitSealed,
    line,
)
from service.capture.link import EngineLink
from service.errors import EngineDied, EngineStuck
from service.work import meters
from tests.support.plans import identity, order
from tests.support.waiting import until

ORDER = order(identity(), 2)
ATTEMPT = ORDER.attempt_id
MOST_ROWS = 65_536
"""The upper bound of `unit_max_samples`."""


HELLO = Hello(
    rank=0,
    num_ranks=1,
    engine_version="0",
    device="cpu",
    cache_shape=(1, 1, 1, 1),
)


class Rank:
    """One connector worker."""

    def __init__(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.rank, self._reader, self._writer = rank, reader, writer

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def say(self, message: FromConnector) -> None:
        self._writer.write(line(message))

    async def heard(self) -> ToConnector:
        async with asyncio.timeout(10):
            return TO_CONNECTOR.validate_json(await self._reader.readline())


Scenario = Callable[[EngineLink, list[Rank]], Awaitable[None]]


def with_ranks(count: int) -> Callable[[Scenario], Callable[[], None]]:
    """Make a test of a scenario with a link and this many connectors."""

    async def run(scenario: Scenario) -> None:
        link = EngineLink()
        await link.listen()
        ranks = []
        for rank in range(count):
            ranks.append(Rank(rank, *await asyncio.open_unix_connection(link.path)))
            ranks[-1].say(HELLO.model_copy(update={"rank": rank, "num_ranks": count}))
        assert [hello.rank for hello in await link.hello(10)] == list(range(count))
        try:
            await scenario(link, ranks)
        finally:
            await asyncio.gather(*(rank.leave() for rank in ranks))
            await link.close()
            # What served the connections ends with them.
            await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    return lambda scenario: lambda: asyncio.run(run(scenario))


async def opened(link: EngineLink, ranks: list[Rank]) -> None:
    opening = asyncio.create_task(link.open(ORDER))
    for rank in ranks:
        assert await rank.heard() == ORDER
        rank.say(UnitOpened(attempt_id=ATTEMPT, rank=rank.rank))
    await opening


@with_ranks(2)
async def test_an_attempt_whose_wait_was_cancelled_is_abandoned_on_every_rank(
    link: EngineLink, ranks: list[Rank]
) -> None:
    await opened(link, ranks)
    waiting = asyncio.create_task(link.receipts(ATTEMPT))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await link.abandon(ATTEMPT)
    assert [await rank.heard() for rank in ranks] == [AbandonUnit(attempt_id=ATTEMPT)] * 2


@with_ranks(2)
async def test_where_one_rank_failed_the_others_are_told_to_forget_the_attempt(
    link: EngineLink, ranks: list[Rank]
) -> None:
    await opened(link, ranks)
    ranks[0].say(UnitFailed(attempt_id=ATTEMPT, rank=0, reason="states-wrong", detail="planted"))
    (receipt,) = await link.receipts(ATTEMPT)
    assert isinstance(receipt, UnitFailed)
    await link.abandon(ATTEMPT)
    assert await ranks[1].heard() == AbandonUnit(attempt_id=ATTEMPT)


@with_ranks(1)
async def test_an_attempt_that_every_rank_has_ended_is_not_abandoned(
    link: EngineLink, ranks: list[Rank]
) -> None:
    await opened(link, ranks)
    ranks[0].say(UnitFailed(attempt_id=ATTEMPT, rank=0, reason="states-wrong", detail="planted"))
    await link.receipts(ATTEMPT)
    await link.abandon(ATTEMPT)
    # What is sent next is what is heard next: nothing came before it.
    await link.skip(ATTEMPT, 1)
    assert await ranks[0].heard() == SkipRow(attempt_id=ATTEMPT, row=1)


@with_ranks(1)
async def test_a_writer_that_opens_no_unit_is_not_waited_for_forever(
    link: EngineLink, ranks: list[Rank]
) -> None:
    with pytest.raises(EngineStuck, match="did not open"):
        await link.open(ORDER, timeout_s=0.1)


SEALED = UnitSealed(
    attempt_id=ATTEMPT,
    rank=0,
    file="train-00000.parquet",
    xxh3="0" * 32,
    footer_xxh3="1" * 32,
    bytes=2**30,
    rows=tuple(range(MOST_ROWS)),
    num_tokens=(4096,) * MOST_ROWS,
)


@with_ranks(1)
async def test_the_receipt_of_the_largest_unit_is_one_line_like_any_other(
    link: EngineLink, ranks: list[Rank]
) -> None:
    await opened(link, ranks)
    ranks[0].say(SEALED)
    assert await link.receipts(ATTEMPT) == (SEALED,)
    assert link.alive


@with_ranks(1)
async def test_a_second_hello_of_a_rank_is_turned_away(link: EngineLink, ranks: list[Rank]) -> None:
    """The engine goes on with the rank that it has."""
    reader, writer = await asyncio.open_unix_connection(link.path)
    writer.write(line(HELLO))
    assert await reader.read() == b""
    writer.close()
    assert link.alive
    await opened(link, ranks)


@with_ranks(1)
async def test_another_users_process_is_turned_away(link: EngineLink, ranks: list[Rank]) -> None:
    own = os.getuid()
    with patch("os.getuid", lambda: own + 1):
        reader, writer = await asyncio.open_unix_connection(link.path)
        assert await reader.read() == b""
    writer.close()
    assert link.alive


FORGE = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    forger = socket.socket(socket.AF_UNIX)
    forger.connect(sys.argv[1])
    forger.sendall(sys.stdin.buffer.read())
    print(forger.recv(1))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.outside
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_second_user_of_the_host_forges_no_receipt_whatever_the_folder_lets_in() -> None:
    """1. the folder keeps the user out  2. opened by mistake, the kernel's word of the user does."""

    @with_ranks(1)
    async def forge(link: EngineLink, ranks: list[Rank]) -> None:
        await opened(link, ranks)
        seen = []
        for _ in range(2):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                FORGE,
                link.path,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            seen.append((await process.communicate(line(SEALED)))[0].decode().strip())
            Path(link.path).parent.chmod(0o777)
            Path(link.path).chmod(0o777)
        assert seen[0] == "PermissionError" and seen[1] in ("b''", "ConnectionResetError", "BrokenPipeError")
        assert link.alive
        ranks[0].say(SEALED)
        assert await link.receipts(ATTEMPT) == (SEALED,)

    forge()


@pytest.mark.parametrize(("rank", "num_ranks"), [(1, 3), (2, 2), (-1, 2)])
def test_ranks_that_contradict_each_other_are_no_engine(rank: int, num_ranks: int) -> None:
    async def contradict() -> None:
        link = EngineLink()
        await link.listen()
        ranks = []
        for number, hello in enumerate(((0, 2), (rank, num_ranks))):
            ranks.append(Rank(number, *await asyncio.open_unix_connection(link.path)))
            ranks[-1].say(HELLO.model_copy(update={"rank": hello[0], "num_ranks": hello[1]}))
            while not link._hellos:
                await asyncio.sleep(0.01)
        while link.alive:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDied, match=f"rank {rank} of {num_ranks}"):
            await link.open(ORDER)
        await asyncio.gather(*(one.leave() for one in ranks))
        await link.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    asyncio.run(contradict())


@pytest.mark.parametrize("why", ["MemoryError: no room for 2.00 GiB", None])
def test_what_a_rank_died_of_is_named(why: str | None) -> None:
    @with_ranks(1)
    async def die(link: EngineLink, ranks: list[Rank]) -> None:
        if why is not None:
            link.failure_path.write_text(why)
        await opened(link, ranks)
        await ranks[0].leave()
        with pytest.raises(EngineDied, match=f"rank 0 of the engine went away: {why or 'without an error'}"):
            await link.receipts(ATTEMPT)

    die()


@with_ranks(2)
async def test_a_rank_does_not_speak_for_another(link: EngineLink, ranks: list[Rank]) -> None:
    opening = asyncio.create_task(link.open(ORDER))
    ranks[0].say(UnitOpened(attempt_id=ATTEMPT, rank=1))
    with pytest.raises(EngineDied, match="rank 0 speaks for rank 1"):
        await opening


LOAD = RankLoad(
    rank=0,
    pool_bytes=1000,
    pool_used_bytes=400,
    pool_waiting_samples=7,
    writers=2,
    writer_busy_seconds=1.5,
    drained_samples=3,
    drained_tokens=30,
    drained_bytes=300,
)


def of_ranks() -> dict[tuple[str, str], float]:
    """Return what the worker's metrics say of ranks: by name, without the beginning of all, and rank."""
    samples = [sample for family in meters.Ranks().collect() for sample in family.samples]
    return {(one.name.removeprefix("quarry_worker_"), one.labels["rank"]): one.value for one in samples}


@with_ranks(2)
async def test_ranks_are_asked_what_they_hold_and_the_last_answer_of_each_is_shown(
    link: EngineLink, ranks: list[Rank]
) -> None:
    """1. Nothing is known. 2. Both are asked, and say it twice. 3. What comes after the end is not shown."""
    assert of_ranks() == {}
    asking = asyncio.create_task(link.ask_loads())
    for rank in ranks:
        assert await rank.heard() == AskLoad()
        for waiting in (7, rank.rank):
            rank.say(LOAD.model_copy(update={"rank": rank.rank, "pool_waiting_samples": waiting}))
    asking.cancel()
    await until(lambda: [load.pool_waiting_samples for load in meters.LOADS.values()] == [0, 1])
    said = {"pool_bytes": 1000, "pool_used_bytes": 400, "writers": 2, "writer_busy_seconds_total": 1.5}
    said |= {
        f"drained_{unit}_total": 3 * more for unit, more in (("samples", 1), ("tokens", 10), ("bytes", 100))
    }
    assert of_ranks() == {
        (name, str(rank)): value
        for rank in (0, 1)
        for name, value in (said | {"pool_waiting_samples": rank}).items()
    }
    await link.close()
    meters.LOADS.clear()
    link._take(LOAD, 0)
    assert of_ranks() == {}


@with_ranks(1)
async def test_a_receipt_names_no_file_but_its_units(link: EngineLink, ranks: list[Rank]) -> None:
    await opened(link, ranks)
    ranks[0].say(SEALED.model_copy(update={"file": "../../00001-1/train-00001.parquet"}))
    with pytest.raises(EngineDied, match="00001-1"):
        await link.receipts(ATTEMPT)


def test_an_attempt_that_is_cancelled_as_its_unit_opens_is_cancelled() -> None:
    """A worker that stops in that moment would else wait for all rows of the unit."""

    async def opening() -> None:
        link = EngineLink()
        opened = asyncio.create_task(link.open(ORDER))
        while ATTEMPT not in link._attempts:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        link._attempts[ATTEMPT].ready.set_result(None)
        await asyncio.sleep(0)
        opened.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opened
        await link.close()

    asyncio.run(opening())
