"""The service's end of the socket, against connectors that the test plays."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from schemas.receipts import (
    TO_CONNECTOR,
    AbandonUnit,
    FromConnector,
    Hello,
    SkipRow,
    ToConnector,
    UnitFailed,
    UnitOpened,
    UnitSealed,
    line,
)
from service.capture.link import EngineLink
from service.errors import EngineStuck
from tests.support.plans import identity, order

ORDER = order(identity(), 2)
KEY = ORDER.key
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
        rank.say(UnitOpened(key=KEY, rank=rank.rank))
    await opening


@with_ranks(2)
async def test_an_attempt_whose_wait_was_cancelled_is_abandoned_on_every_rank(
    link: EngineLink, ranks: list[Rank]
) -> None:
    await opened(link, ranks)
    waiting = asyncio.create_task(link.receipts(KEY))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await link.abandon(KEY)
    assert [await rank.heard() for rank in ranks] == [AbandonUnit(key=KEY)] * 2


@with_ranks(2)
async def test_where_one_rank_failed_the_others_are_told_to_forget_the_attempt(
    link: EngineLink, ranks: list[Rank]
) -> None:
    await opened(link, ranks)
    ranks[0].say(UnitFailed(key=KEY, rank=0, reason="states-wrong", detail="planted"))
    (receipt,) = await link.receipts(KEY)
    assert isinstance(receipt, UnitFailed)
    await link.abandon(KEY)
    assert await ranks[1].heard() == AbandonUnit(key=KEY)


@with_ranks(1)
async def test_an_attempt_that_every_rank_has_ended_is_not_abandoned(
    link: EngineLink, ranks: list[Rank]
) -> None:
    await opened(link, ranks)
    ranks[0].say(UnitFailed(key=KEY, rank=0, reason="states-wrong", detail="planted"))
    await link.receipts(KEY)
    await link.abandon(KEY)
    # What is sent next is what is heard next: nothing came before it.
    await link.skip(KEY, 1)
    assert await ranks[0].heard() == SkipRow(key=KEY, row=1)


@with_ranks(1)
async def test_a_writer_that_opens_no_unit_is_not_waited_for_forever(
    link: EngineLink, ranks: list[Rank]
) -> None:
    with pytest.raises(EngineStuck, match="did not open"):
        await link.open(ORDER, timeout_s=0.1)


SEALED = UnitSealed(
    key=KEY,
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
    assert await link.receipts(KEY) == (SEALED,)
    assert link.alive
