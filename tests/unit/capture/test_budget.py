import asyncio
import functools

import pytest

from service.capture.budget import InFlight


def in_a_loop(test):
    @functools.wraps(test)
    def run(**arguments):
        asyncio.run(asyncio.wait_for(test(**arguments), 60))

    return run


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@in_a_loop
async def test_requests_pass_in_their_order_and_never_above_the_bounds():
    budget, order = InFlight(100, 3), []

    async def request(name, tokens):
        async with budget.hold(tokens):
            order.append(name)
            assert budget.tokens <= 100 and budget.requests <= 3
            await settle()

    # The small one behind the large one waits: otherwise a stream of small ones would starve it.
    await asyncio.gather(
        request("a", 60), request("b", 60), request("c", 10), *(request(i, 30) for i in range(9))
    )
    assert order == ["a", "b", "c", *range(9)]
    assert (budget.tokens, budget.requests) == (0, 0)


@in_a_loop
async def test_a_request_larger_than_the_budget_passes_alone():
    budget = InFlight(10, 3)
    async with budget.hold(1000):
        behind = budget.hold(1)
        other = asyncio.create_task(behind.__aenter__())
        await settle()
        assert not other.done()
    await other
    assert budget.tokens == 1


@in_a_loop
async def test_a_small_request_that_must_be_alone_waits_for_those_before_it_and_lets_none_in():
    budget = InFlight(100, 3)
    before, lone, behind = budget.hold(10), budget.hold(10, alone=True), budget.hold(10)
    await before.__aenter__()
    waiting = [asyncio.create_task(hold.__aenter__()) for hold in (lone, behind)]
    await settle()
    assert not waiting[0].done()
    await before.__aexit__(None, None, None)
    await settle()
    assert [hold.done() for hold in waiting] == [True, False]
    await lone.__aexit__(None, None, None)
    await waiting[1]
    assert budget.tokens == 10


@in_a_loop
async def test_a_request_that_goes_ahead_waits_only_for_those_before_it_and_one_of_the_queue():
    budget, order = InFlight(100, 1), []

    async def request(name, *, ahead=False):
        async with budget.hold(10, ahead=ahead):
            order.append(name)
            await settle()

    queued = [asyncio.create_task(request(name)) for name in range(4)]
    await asyncio.sleep(0)
    await asyncio.gather(request("a", ahead=True), request("b", ahead=True), *queued)
    assert order == [0, 1, "a", "b", 2, 3]


@pytest.mark.parametrize("granted", [True, False], ids=["just granted", "still waiting"])
@in_a_loop
async def test_a_cancelled_request_gives_its_place_back(granted):
    budget = InFlight(10, 3)
    holder = budget.hold(10)
    await holder.__aenter__()
    second, third = budget.hold(10), budget.hold(10)
    waiting = asyncio.create_task(second.__aenter__())
    behind = asyncio.create_task(third.__aenter__())
    await settle()
    if granted:
        await holder.__aexit__(None, None, None)
        waiting.cancel()
    else:
        waiting.cancel()
        await settle()
        await holder.__aexit__(None, None, None)
    await asyncio.wait_for(behind, 60)
    assert (budget.tokens, budget.requests) == (10, 1)


@in_a_loop
async def test_silence_ends_only_while_something_is_out_and_nothing_comes_back():
    budget = InFlight(100, 3)
    silence = asyncio.create_task(budget.silence(0.2))
    await asyncio.wait({silence}, timeout=1.0)
    assert not silence.done()
    async with budget.hold(10):
        await silence
    silence = asyncio.create_task(budget.silence(30.0))
    async with budget.hold(10), budget.hold(10):
        budget._changed -= 29.9
        async with budget.hold(10):
            pass
        await asyncio.wait({silence}, timeout=0.5)
        assert not silence.done()
    silence.cancel()


@in_a_loop
async def test_a_request_is_shared_if_another_came_before_it_left_or_was_there_when_it_came():
    budget = InFlight(100, 3)
    async with budget.hold(10) as lone:
        pass
    async with budget.hold(10) as first, budget.hold(10) as second:
        pass
    async with budget.hold(10) as last:
        pass
    shared = [held.is_shared for held in (lone, first, second, last)]
    assert shared == [False, True, True, False]


@in_a_loop
async def test_several_requests_wait_until_there_is_room_for_all_of_them():
    budget, held = InFlight(100, 4), asyncio.Event()

    async def several() -> None:
        async with budget.hold(30, num_requests=3, ahead=True):
            held.set()

    async with budget.hold(10):
        async with budget.hold(10):
            waiting = asyncio.create_task(several())
            await asyncio.sleep(0)
            assert not held.is_set()
        await waiting
    assert (budget.requests, budget.tokens) == (0, 0)
