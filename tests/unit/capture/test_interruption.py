"""Work that is interrupted or fails ends the rest, which gets the time to clean up."""

import asyncio

import pytest

from service.capture.interruption import together


async def run(rounds: int, cleaned: list[int]) -> None:
    """Run until cancelled; then clean up, which takes `rounds` of the loop."""
    try:
        await asyncio.sleep(60)
    finally:
        for _ in range(rounds):
            await asyncio.sleep(0)
        cleaned.append(rounds)


def test_all_clean_up_if_their_caller_is_cancelled() -> None:
    """A prompt whose abort is cut short stays in the engine."""
    cleaned: list[int] = []

    async def cancelled() -> None:
        running = asyncio.create_task(together(run(rounds, cleaned) for rounds in (0, 5)))
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert cleaned == [0, 5]


def test_the_first_error_is_raised_as_it_is_once_the_others_have_ended() -> None:
    cleaned: list[int] = []

    async def fail() -> None:
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        asyncio.run(together([run(5, cleaned), fail()]))
    assert cleaned == [5]
