"""What ranks say of themselves is asked for, added up, and goes on from one engine to the next."""

import asyncio
from typing import Any

from schemas.receipts import AskLoad, Hello, RankLoad, line
from service.capture.link import EngineLink
from service.capture.watching import watched
from service.work import meters
from tests.support.engine_bench import until
from tests.unit.capture.test_link import HELLO, Rank

LOAD = RankLoad(
    rank=0,
    pool_bytes=1000,
    pool_used_bytes=400,
    waiting_rows=0,
    writers=2,
    busy_s=1.5,
    drained_rows=3,
    drained_tokens=30,
    drained_bytes=300,
)


def now() -> dict[str, float]:
    """Return the worker's counters of drained rows and busy writers, and its gauges."""
    collectors = [*meters.DRAINED._counters.values(), meters.WRITERS_BUSY, *meters.RANKS.values()]
    samples = [sample for one in collectors for metric in one.collect() for sample in metric.samples]
    return {
        sample.name.removeprefix("quarry_worker_"): sample.value
        for sample in samples
        if not sample.name.endswith("_created")
    }


async def an_engine(*loads: list[dict[str, Any]]) -> dict[str, float]:
    """Let each rank of an engine answer with its loads one after another; return what is shown then."""
    link = EngineLink()
    await link.listen()
    async with watched(link, asks=True):
        ranks = []
        for number in range(len(loads)):
            ranks.append(Rank(number, *await asyncio.open_unix_connection(link.path)))
            hello: Hello = HELLO.model_copy(update={"rank": number, "num_ranks": len(loads)})
            ranks[-1].say(hello)
        await link.hello(10)
        await link.ask_load()
        for rank, said in zip(ranks, loads, strict=True):
            assert await rank.heard() == AskLoad()
            for changes in said:
                rank.say(LOAD.model_copy(update={"rank": rank.rank} | changes))
        last = sum(said[-1]["pool_used_bytes"] for said in loads)
        await until(lambda: now()["pool_used_bytes"] == last)
        shown = now()
        await asyncio.gather(*(rank.leave() for rank in ranks))
        await link.close()
    return shown


def test_loads_of_ranks_add_up_and_counters_go_on_with_the_next_engine() -> None:
    before = now()
    first = asyncio.run(
        an_engine(
            [{"pool_used_bytes": 1}, {"pool_used_bytes": 10, "drained_rows": 5, "busy_s": 2.0}],
            [{"pool_used_bytes": 20, "waiting_rows": 7}],
        )
    )
    assert first["drained_samples_total"] - before["drained_samples_total"] == 5 + 3
    assert first["drained_bytes_total"] - before["drained_bytes_total"] == 600
    assert first["writer_busy_seconds_total"] - before["writer_busy_seconds_total"] == 3.5
    shown = ("pool_bytes", "pool_used_bytes", "pool_waiting_samples", "writers")
    assert [first[name] for name in shown] == [2000, 30, 7, 4]
    assert [now()[name] for name in shown] == [0, 0, 0, 0]
    second = asyncio.run(an_engine([{"pool_used_bytes": 5}]))
    assert second["drained_samples_total"] - first["drained_samples_total"] == 3


def test_a_rank_that_speaks_of_another_breaks_its_link() -> None:
    async def scenario() -> bool:
        link = EngineLink()
        await link.listen()
        rank = Rank(0, *await asyncio.open_unix_connection(link.path))
        rank.say(HELLO)
        await link.hello(10)
        rank._writer.write(line(LOAD.model_copy(update={"rank": 1})))
        await until(lambda: not link.alive)
        await rank.leave()
        await link.close()
        return link.alive

    assert not asyncio.run(scenario())
