"""One conformance suite for everything that fills `service.capture.engine.Engine`.

The tests' engine and vLLM's CPU build.

Each test captures rows through the real connector and reads the sealed file back. The truth is the fake's
pure function, or a transformers forward pass of the same weights.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connector.wire import RowRef
from schemas.generate import Generate
from schemas.names import attempt_dir
from schemas.receipts import AttemptId, UnitFailed, UnitSealed
from service.capture.engine import WITNESS_TOKENS, EngineSpec, Prompt, PromptRefused
from service.proof.head import Head
from service.settings import Settings
from tests.support.engine_bench import Bench, by_row, sealed, started
from tests.support.fake_engine import NUM_BLOCKS, FakeEngine, states_TH
from tests.support.plans import JOB, random_ids
from tests.support.real_engine import meter, vllm_bench
from tests.support.tiny_model import random_target
from tests.support.waiting import until

LAYERS = (2, 4, 8)
MAX_LEN = 512
HIDDEN = 128
POOL_BYTES = 2**20
"""Holds one row of the longest length and little more, so that every test runs against a full pool."""
OPTIONS = {"max_num_batched_tokens": 128, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(
        tmp_path_factory.mktemp("target") / "qwen3", hidden=HIDDEN, dtype="float32", max_position=MAX_LEN
    )


@pytest.fixture(scope="module", params=["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def bench(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    data = tmp_path_factory.mktemp("data")
    if request.param == "vllm":
        with vllm_bench(
            data, target, layers=LAYERS, max_len=MAX_LEN, engine_options=OPTIONS, pool_bytes=POOL_BYTES
        ) as bench:
            yield bench
        return

    def pure(prompts):
        return [{k: states_TH(ids, k, HIDDEN, "float32") for k in LAYERS} for ids in prompts]

    spec = EngineSpec(target, "r", "float32", LAYERS, HIDDEN, MAX_LEN, decode=True)
    settings = Settings(data_dir=data, pool_bytes=POOL_BYTES)
    with started(FakeEngine(), spec, settings, pure, tolerance=0.0, vocab_size=2048) as bench:
        yield bench
        no_block_is_lost(bench)


def no_block_is_lost(bench: Bench) -> None:
    """Wait until every block of the tests' engine is free; vLLM's are counted in `tests/e2e`."""
    if isinstance(bench.engine, FakeEngine):
        engine = bench.engine
        bench.loop.call(until(lambda: len(engine._free) == NUM_BLOCKS - 1))


@pytest.fixture
def running(bench: Bench) -> Callable[[], float]:
    """Return what says how many requests are being computed."""
    fake = bench.engine if isinstance(bench.engine, FakeEngine) else None
    return lambda: fake.computing if fake else meter("num_requests_running")


def test_every_length_around_blocks_and_chunks_is_captured_right(bench):
    size = int(bench.engine.info.options["block_size"])
    prompts = random_ids([1, 2, size - 1, size, size + 1, 300, MAX_LEN - 1], vocab_size=bench.vocab_size)
    _, rows, _ = bench.capture(prompts)
    bench.assert_right(rows, by_row(prompts))


def test_rows_that_share_prefixes_are_captured_right_when_the_cache_hits(bench):
    head = random_ids([300], vocab_size=bench.vocab_size, seed=1)[0]
    tails = random_ids([1, 7, 60, 128], vocab_size=bench.vocab_size, seed=2)
    prompts = [head, *[head + tail for tail in tails], head[:256], head]
    for _ in range(2):
        _, rows, _ = bench.capture(prompts)
        bench.assert_right(rows, by_row(prompts))


def test_a_full_pool_delays_rows_and_loses_none(bench):
    prompts = random_ids([200] * 40, vocab_size=bench.vocab_size, seed=3)
    receipt, rows, _ = bench.capture(prompts)
    assert len(receipt.rows) == 40
    bench.assert_right(rows, by_row(prompts))


def test_a_request_aborted_while_it_is_computed_is_a_void_row_and_the_others_are_right(bench, running):
    """1. Two requests with long answers are being computed. 2. Others join them. 3. The two are cancelled."""
    prompts = random_ids([100, 101, *[MAX_LEN - 1] * 10], vocab_size=bench.vocab_size, seed=4)

    async def aborted() -> UnitSealed | UnitFailed:
        attempt = await bench.open(prompts)
        if isinstance(bench.engine, FakeEngine):
            bench.engine.step_delay_s = 600.0
        tasks = [attempt.start(row, Generate(max_tokens=400)) for row in (0, 1)]
        await until(lambda: running() == 2)
        if isinstance(bench.engine, FakeEngine):
            bench.engine.step_delay_s = 0.0
        others = [attempt.start(row) for row in range(2, len(prompts))]
        await until(lambda: running() > 2 or any(task.done() for task in others))
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
        await asyncio.gather(*others)
        return await attempt.receipt()

    receipt = sealed(bench.loop.call(aborted()))
    assert set(receipt.void) == {0, 1}
    bench.assert_right(bench.rows(receipt), dict(list(by_row(prompts).items())[2:]))


def test_a_skipped_row_does_not_hold_the_unit(bench):
    prompts = random_ids([10, 11, 12], vocab_size=bench.vocab_size, seed=5)

    async def skipping() -> UnitSealed | UnitFailed:
        attempt = await bench.open(prompts)
        await bench.link.skip(attempt.attempt_id, 0)
        await asyncio.gather(attempt.run(1), attempt.run(2))
        return await attempt.receipt()

    receipt = sealed(bench.loop.call(skipping()))
    assert receipt.void == ()
    bench.assert_right(bench.rows(receipt), {1: prompts[1], 2: prompts[2]})


def test_an_answer_is_captured_with_its_prompt_but_for_the_last_sampled_token(bench):
    prompts = random_ids([1, 15, 127, 130, 40], vocab_size=bench.vocab_size, seed=6)
    _, rows, answers = bench.capture(prompts, generate=Generate(max_tokens=20))
    assert all(len(answer.token_ids) == 20 for answer in answers)
    bench.assert_right(rows, by_row(prompts, answers))


def test_a_request_without_a_row_is_answered_and_not_captured(bench):
    (prompt,) = random_ids([20], vocab_size=bench.vocab_size, seed=7)
    answer = bench.loop.call(bench.engine.run(Prompt("alone", tuple(prompt), None)))
    assert len(answer.token_ids) == 1
    receipt, _, _ = bench.capture([prompt])
    assert receipt.rows == (0,)


def test_an_abandoned_attempt_leaves_no_file_and_the_next_one_is_right(bench):
    prompts = random_ids([30] * 4, vocab_size=bench.vocab_size, seed=8)

    async def half() -> AttemptId:
        attempt = await bench.open(prompts)
        await attempt.run(0)
        await bench.link.abandon(attempt.attempt_id)
        if isinstance(bench.engine, FakeEngine):
            writers = bench.engine._worker._writers
            await until(lambda: not writers.is_open(attempt.attempt_id))
        # A row of an attempt that is over: its blocks must come back all the same.
        ids = tuple(prompts[1])
        await bench.engine.run(Prompt("late", ids, RowRef(attempt.attempt_id, 1, len(ids))))
        return attempt.attempt_id

    key = bench.loop.call(half())
    no_block_is_lost(bench)
    _, rows, _ = bench.capture(prompts)
    bench.assert_right(rows, by_row(prompts))
    folder = bench.settings.work_root / attempt_dir(JOB, key.unit, key.epoch)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_an_attempt_whose_receipts_were_waited_for_in_vain_is_forgotten_as_well(bench):
    """1. Some rows run, others never will. 2. The wait for the receipts is cancelled, as with its unit."""
    prompts = random_ids([30] * 4, vocab_size=bench.vocab_size, seed=10)

    async def cancelled() -> AttemptId:
        attempt = await bench.open(prompts)
        waiting = asyncio.create_task(attempt.receipt())
        await attempt.run(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await bench.link.abandon(attempt.attempt_id)
        folder = bench.settings.work_root / attempt_dir(
            JOB, attempt.attempt_id.unit, attempt.attempt_id.epoch
        )
        async with asyncio.timeout(30):
            while folder.exists() and any(folder.iterdir()):
                await asyncio.sleep(0.05)
        return attempt.attempt_id

    bench.loop.call(cancelled())
    _, rows, _ = bench.capture(prompts)
    bench.assert_right(rows, by_row(prompts))


def test_the_witness_is_the_models_own_next_token(bench):
    prompts = random_ids([5, 50, 129], vocab_size=bench.vocab_size, seed=9)
    _, rows, answers = bench.capture(prompts)
    head = Head.load(bench.spec.weights, "float32")
    for row, answer in enumerate(answers):
        assert len(answer.likely) == WITNESS_TOKENS
        logprobs = head.logprobs(bench.states(rows[row], 8)[-1:])[0]
        assert int(logprobs.argmax()) == answer.likely[0][0]
        for token, logprob in answer.likely:
            assert float(logprobs[token]) == pytest.approx(logprob, abs=1e-3)


def test_a_prompt_the_engine_cannot_run_is_refused_and_the_engine_lives_on(bench):
    bad = (13, 13, *range(MAX_LEN)) if isinstance(bench.engine, FakeEngine) else tuple([1] * (MAX_LEN + 5))
    with pytest.raises(PromptRefused):
        bench.loop.call(bench.engine.run(Prompt("bad", bad, None)))
    bench.loop.call(bench.engine.run(Prompt("good", (1, 2, 3), None)))
