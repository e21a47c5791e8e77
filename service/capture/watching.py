"""Asks the connector's ranks what they hold and have done, for the worker's metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schemas.receipts import RankLoad
from service.capture.link import EngineLink
from service.work import meters

ASK_S = 1.0
NOTHING = RankLoad.model_validate(dict.fromkeys(RankLoad.model_fields, 0) | {"kind": "load"})


@asynccontextmanager
async def watched(link: EngineLink, *, asks: bool) -> AsyncIterator[None]:
    """Count what the ranks of one engine say of themselves; in this block they are asked, if at all."""
    loads: dict[int, RankLoad] = {}

    def take(load: RankLoad) -> None:
        before = loads.get(load.rank, NOTHING)
        loads[load.rank] = load
        # Two threads of a rank may say so at its end, the later first.
        meters.DRAINED.add(
            samples=max(0, load.drained_rows - before.drained_rows),
            tokens=max(0, load.drained_tokens - before.drained_tokens),
            bytes=max(0, load.drained_bytes - before.drained_bytes),
        )
        meters.WRITERS_BUSY.inc(max(0.0, load.busy_s - before.busy_s))
        show()

    def show() -> None:
        for field, gauge in meters.RANKS.items():
            gauge.set(sum(getattr(load, field) for load in loads.values()))

    async def ask() -> None:
        while asks:
            await link.ask_load()
            await asyncio.sleep(ASK_S)
            if any(load.waiting_rows for load in loads.values()):
                meters.POOL_FULL.inc(ASK_S)

    link.on_load = take
    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        asking.cancel()
        link.on_load = lambda load: None
        await asyncio.wait({asking})
        loads.clear()
        show()
