"""The errors for failed and missing receipts; they decide what happens to the unit."""

import asyncio
import math
from collections.abc import Awaitable, Sequence

from schemas.dataset.errors import NO_SPACE
from schemas.receipts import UnitFailed, UnitSealed
from service.capture.link import Receipt
from service.errors import DiskFull, EngineDied, EngineStuck, QuarryError, StatesWrong, WriteFailed
from service.work.meters import LOADS

ERRORS: dict[str, type[QuarryError]] = {
    "states-wrong": StatesWrong,
    "internal": EngineDied,
    "write-failed": WriteFailed,
    "plan-unreadable": WriteFailed,
}


async def in_time(receipts: Awaitable[tuple[Receipt, ...]], timeout_s: float) -> tuple[Receipt, ...]:
    """Wait for the receipts once all rows were answered: if a row was lost, its receipt would never arrive.

    A slow disk is not taken for that. Rows leave a rank's cache in the order in which they were answered:
    while those that wait there do so at any rank, the time starts anew.

    Raises EngineDied, and EngineStuck if they do not arrive in time.
    """
    waiting = asyncio.ensure_future(receipts)
    answered: dict[int, int] = {}
    try:
        while True:
            before = {rank: load.drained_samples for rank, load in LOADS.items()}
            if (await asyncio.wait({waiting}, timeout=timeout_s))[0]:
                return await waiting
            behind = {rank for rank in LOADS if before.get(rank, 0) < answered.get(rank, math.inf)}
            if all(LOADS[rank].drained_samples == before.get(rank, 0) for rank in behind):
                break
            for rank, load in LOADS.items():  # by now all of these are among its rows
                rows = load.drained_samples + load.pool_waiting_samples
                answered[rank] = min(answered.get(rank, rows), rows)
    finally:
        waiting.cancel()
    raise EngineStuck(f"every row was answered, but no receipt came within {timeout_s:.0f} s")


def silent(seconds: float) -> EngineStuck:
    """Return the error for an engine that holds requests and answers none."""
    return EngineStuck(
        f"the engine holds requests, and has answered none for {seconds:.0f} s",
        cure="see the engine's log and the disk; if one answer takes as long, raise QUARRY_ENGINE_SILENCE_S",
    )


def raise_failure(receipts: Sequence[UnitSealed | UnitFailed]) -> tuple[UnitSealed, ...]:
    """Return the receipts if all are of sealed files.

    Raises DiskFull, StatesWrong, EngineDied, WriteFailed.
    """
    sealed = []
    for receipt in receipts:
        if isinstance(receipt, UnitSealed):
            sealed.append(receipt)
            continue
        detail = f"unit {receipt.attempt_id.unit}, rank {receipt.rank}: {receipt.detail}"
        if receipt.errno in NO_SPACE:
            raise DiskFull(detail, cure="free space in the data folder, then resume the job")
        raise ERRORS[receipt.reason](detail)
    return tuple(sealed)
