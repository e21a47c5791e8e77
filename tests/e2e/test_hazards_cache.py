"""What the engine does with its cache leaves every row right, or the unit fails by name.

One engine whose cache holds two of the longest requests, whose prefill is cut into chunks of three blocks,
and whose host pool holds one of the longest rows. Rows are copied as early as a device may copy them.
"""

import asyncio
from collections.abc import Iterator

import pytest

from schemas.generate import Generate
from schemas.receipts import UnitFailed, UnitSealed
from tests.support.device import ON_CUDA
from tests.support.engine_bench import Bench, by_row
from tests.support.engine_probe import PROBED, ask
from tests.support.plans import random_ids
from tests.support.real_engine import early_gather, meter, vllm_bench
from tests.support.tiny_model import random_target
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_block_is_lost")]

BLOCK, CHUNK, MAX_LEN = 32, 96, 512
LAYERS = (2, 4, 8)
OPTIONS = {
    "block_size": BLOCK,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 36,
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("cache")
    target = random_target(folder / "qwen3", dtype="float32", max_position=MAX_LEN)
    with (
        early_gather(),
        vllm_bench(
            folder / "data",
            target,
            layers=LAYERS,
            max_len=MAX_LEN,
            engine_options=OPTIONS | PROBED,
            pool_bytes=2**20,
        ) as bench,
    ):
        yield bench


def test_chunks_of_a_prefill_are_captured_right_beside_each_other(bench):
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, MAX_LEN - 1]
    prompts = random_ids(lengths, vocab_size=bench.vocab_size, seed=1)
    _, rows, _ = bench.capture(prompts)
    bench.assert_right(rows, by_row(prompts))


def test_prefix_hits_across_block_borders_bring_their_states_along(bench):
    """1. A head of five and a half blocks is captured. 2. Rows that share 1 to 5.5 blocks of it hit.

    3. So do exact repeats, of which the engine computes the last block anew.
    """
    head = random_ids([5 * BLOCK + BLOCK // 2], vocab_size=bench.vocab_size, seed=2)[0]
    tails = random_ids([1, BLOCK - 1, BLOCK, BLOCK + 1, 7], vocab_size=bench.vocab_size, seed=3)
    shared = [BLOCK, BLOCK + 1, 3 * BLOCK - 1, 4 * BLOCK, len(head)]
    _, rows, _ = bench.capture([head])
    bench.assert_right(rows, {0: head})
    hits = meter("prefix_cache_hits")
    prompts = [
        *(head[:n] + tail for n, tail in zip(shared, tails, strict=True)),
        head,
        head,
        head[: 2 * BLOCK],
    ]
    _, rows, _ = bench.capture(prompts)
    assert meter("prefix_cache_hits") - hits >= (1 + 1 + 2 + 4 + 5 + 5 + 5 + 1) * BLOCK
    bench.assert_right(rows, by_row(prompts))


def test_hits_on_blocks_that_were_filled_by_decoding_bring_their_states_along(bench):
    prompts = random_ids([BLOCK // 2], vocab_size=bench.vocab_size, seed=4)
    _, rows, answers = bench.capture(prompts, generate=Generate(max_tokens=4 * BLOCK))
    bench.assert_right(rows, by_row(prompts, answers))
    whole = [*prompts[0], *answers[0].token_ids]
    assert len(whole) > 4 * BLOCK
    hits = meter("prefix_cache_hits")
    again = [whole[:length] for length in (BLOCK + 1, 2 * BLOCK - 1, 3 * BLOCK, 4 * BLOCK + 1)]
    _, rows, _ = bench.capture(again)
    assert meter("prefix_cache_hits") - hits >= (1 + 1 + 2 + 4) * BLOCK
    bench.assert_right(rows, by_row(again))


def test_preempted_requests_are_captured_right_while_the_host_pool_is_full(bench):
    """1. No row is written, so the pool fills and finished requests keep their blocks.

    2. The rest outgrows the cache: requests are preempted, some wait. 3. Writing goes on: every row is right.
    """
    prompts = random_ids([60] * 12, vocab_size=bench.vocab_size, seed=5)
    answers_of = Generate(max_tokens=120)

    async def squeezed() -> tuple[UnitSealed | UnitFailed, list[object]]:
        preempted = meter("num_preemptions")
        await ask(bench, "stall_writers")
        attempt = await bench.open(prompts)
        tasks = [attempt.start(row, answers_of) for row in range(len(prompts))]
        await until(lambda: meter("num_preemptions") > preempted)
        await until(lambda: sum(task.done() for task in tasks) >= 4)
        assert not all(task.done() for task in tasks)
        await ask(bench, "release_writers")
        answers = await asyncio.gather(*tasks)
        print(f"preemptions: {meter('num_preemptions') - preempted:.0f}")
        return await attempt.receipt(), answers

    receipt, answers = bench.loop.call(squeezed())
    assert isinstance(receipt, UnitSealed), receipt
    bench.assert_right(bench.rows(receipt), by_row(prompts, answers))


def test_more_rows_than_the_cache_holds_wait_for_a_full_pool_and_none_is_lost(bench):
    """The pool holds one row, three more wait with their blocks held, and the last finds no block."""
    prompts = random_ids([MAX_LEN - 1] * 6, vocab_size=bench.vocab_size, seed=6)

    async def waited() -> UnitSealed | UnitFailed:
        await ask(bench, "stall_writers")
        attempt = await bench.open(prompts)
        tasks = [attempt.start(row) for row in range(len(prompts))]
        # One row is in the pool, and two fill the cache.
        await until(lambda: sum(task.done() for task in tasks) == 3 and meter("num_requests_waiting") == 3)
        await ask(bench, "release_writers")
        await asyncio.gather(*tasks)
        return await attempt.receipt()

    receipt = bench.loop.call(waited())
    assert isinstance(receipt, UnitSealed), receipt
    bench.assert_right(bench.rows(receipt), by_row(prompts))


def test_answers_that_reach_the_longest_length_leave_their_neighbours_right(bench):
    """The runner skips the capture of a batch that holds a sequence beyond its drafter's length."""
    prompts = random_ids(
        [MAX_LEN - 1, MAX_LEN - 2, MAX_LEN - 7, 430, 470], vocab_size=bench.vocab_size, seed=7
    )
    _, rows, answers = bench.capture(prompts, generate=Generate(max_tokens=MAX_LEN))
    lengths = [len(ids) + len(answer.token_ids) for ids, answer in zip(prompts, answers, strict=True)]
    assert lengths == [MAX_LEN] * 5
    bench.assert_right(rows, by_row(prompts, answers))


@pytest.mark.skipif(ON_CUDA, reason="runner V2, which a GPU runs, skips no capture")
@pytest.mark.parametrize(
    ("up_to", "unstored"), [(1, "40 of 40 tokens, the first at 0"), (200, " of 300 tokens")]
)
def test_a_step_whose_capture_the_engine_skipped_fails_the_unit_instead_of_storing_old_states(
    bench, up_to, unstored
):
    """1. The cache is filled with states. 2. The runner skips batches with longer sequences than `up_to`."""
    full = random_ids([MAX_LEN - 1] * 3, vocab_size=bench.vocab_size, seed=8)
    _, rows, _ = bench.capture(full)
    bench.assert_right(rows, by_row(full))
    prompts = random_ids([40, 300], vocab_size=bench.vocab_size, seed=9)

    async def skipped() -> UnitSealed | UnitFailed:
        await ask(bench, "capture_up_to", up_to)
        try:
            attempt = await bench.open(prompts)
            await asyncio.gather(*(attempt.run(row) for row in range(len(prompts))))
            return await attempt.receipt()
        finally:
            await ask(bench, "capture_up_to", None)

    receipt = bench.loop.call(skipped())
    assert isinstance(receipt, UnitFailed), receipt
    assert receipt.reason == "states-wrong"
    assert "the engine stored no state for" in receipt.detail
    assert unstored in receipt.detail
