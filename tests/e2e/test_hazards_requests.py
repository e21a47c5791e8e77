"""However a request ends or is called, its row is right or void, and no other row knows of it.

One engine that takes long prompts in small chunks, so that a test can meet a request at any stage of its
life.
"""

import asyncio
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.generate import Generate
from schemas.names import attempt_dir
from schemas.receipts import UnitFailed, UnitSealed
from service.capture.engine import Answer, Prompt
from service.errors import EngineRefused
from service.proof.head import Head
from tests.support.device import ON_CUDA
from tests.support.engine_bench import Bench, by_row, sealed
from tests.support.engine_probe import PROBED, ask
from tests.support.plans import JOB, random_ids
from tests.support.real_engine import free_blocks, meter, truth_of, vllm_bench
from tests.support.tiny_model import random_target
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_block_is_lost")]

MAX_LEN = 2048
LAYERS = (2, 4, 8)
OPTIONS = {"block_size": 32, "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 200}
ENDS_AT_ONCE = random_ids([23], vocab_size=1500, seed=100)[0]
"""A prompt whose answer is one token, the end: the target's configuration is made so."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = random_target(
        tmp_path_factory.mktemp("requests") / "qwen3", dtype="float32", max_position=MAX_LEN
    )
    (states,) = truth_of(folder, LAYERS)([ENDS_AT_ONCE])
    first = int(Head.load(folder, "float32").logprobs(states[8][-1:])[0].argmax())
    file = folder / "generation_config.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps(told | {"eos_token_id": [told["eos_token_id"], first]}))
    return folder


@pytest.fixture(scope="module")
def bench(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with vllm_bench(
        tmp_path_factory.mktemp("data"),
        target,
        layers=LAYERS,
        max_len=MAX_LEN,
        engine_options=OPTIONS | PROBED,
        pool_bytes=2**20,
    ) as bench:
        yield bench


async def gone(task: "asyncio.Task[Answer]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_requests_aborted_while_they_wait_prefill_or_decode_are_void_and_all_others_right(bench):
    """1. One is cancelled within its prefill. 2. One while it decodes. 3. One while it waits for a place.

    4. One is cancelled after it was answered: its row stands.
    """
    lengths = [MAX_LEN - 1, 40, 50, 60, 70, 33, 300]
    prompts = random_ids(lengths, vocab_size=bench.vocab_size, seed=1)
    long_answer, short_answer = Generate(max_tokens=1500), Generate(max_tokens=10)

    async def aborted() -> UnitSealed | UnitFailed:
        attempt = await bench.open(prompts)
        prefilling = attempt.start(0)
        await until(lambda: meter("num_requests_running") == 1)
        await gone(prefilling)
        decoding = [attempt.start(row, long_answer) for row in (1, 2, 3, 4)]
        begun = meter("generation_tokens")
        await until(lambda: meter("num_requests_running") == 4 and meter("generation_tokens") > begun + 20)
        waiting = attempt.start(5)
        await until(lambda: meter("num_requests_waiting") == 1)
        await gone(waiting)
        for task in decoding:
            await gone(task)
        answered = attempt.start(6, short_answer)
        answers.append(await answered)
        answered.cancel()
        return await attempt.receipt()

    answers: list[Answer] = []
    receipt = sealed(bench.loop.call(aborted()))
    assert set(receipt.void) == {0, 1, 2, 3, 4, 5}
    bench.assert_right(bench.rows(receipt), {6: [*prompts[6], *answers[0].token_ids[:-1]]})


def test_aborts_beside_healthy_rows_of_the_same_batch_leave_those_right(bench):
    prompts = random_ids([200, 40, 64, 300, 96, 31], vocab_size=bench.vocab_size, seed=2)
    answers_of = Generate(max_tokens=60)

    async def mixed() -> tuple[UnitSealed | UnitFailed, dict[int, Answer]]:
        attempt = await bench.open(prompts)
        tasks = {row: attempt.start(row, answers_of) for row in range(len(prompts))}
        begun = meter("generation_tokens")
        await until(lambda: meter("generation_tokens") > begun + 30)
        await gone(tasks.pop(next(row for row, task in tasks.items() if not task.done())))
        return await attempt.receipt(), {row: await task for row, task in tasks.items()}

    receipt, answers = bench.loop.call(mixed())
    assert {*sealed(receipt).void} == {*range(len(prompts))} - answers.keys()
    due = {row: [*prompts[row], *answer.token_ids[:-1]] for row, answer in answers.items()}
    bench.assert_right(bench.rows(sealed(receipt)), due)


def test_an_attempt_abandoned_while_its_copies_wait_gives_its_blocks_back_and_its_successor_is_right(bench):
    """1. The pool is full of a row that cannot be written, a second one waits with its blocks held.

    2. The attempt is abandoned: the blocks come back while the pool is still full. 3. Writing goes on. 4. The
    next attempt at the same unit runs the same rows, and holds nothing of the old one.
    """
    prompts = random_ids([1100, 1101, 33], vocab_size=bench.vocab_size, seed=3)

    async def succeeded() -> tuple[UnitSealed | UnitFailed, Path]:
        await ask(bench, "stall_writers")
        first = await bench.open(prompts)
        for row in (0, 1):
            await first.run(row)
        assert not await bench.engine._llm.reset_prefix_cache()
        await bench.link.abandon(first.attempt_id)
        await free_blocks(bench)
        await ask(bench, "release_writers")
        second = await bench.open(prompts, unit=first.attempt_id.unit, epoch=2)
        await asyncio.gather(*(second.run(row) for row in range(len(prompts))))
        return await second.receipt(), bench.settings.work_root / attempt_dir(JOB, first.attempt_id.unit, 1)

    receipt, old = bench.loop.call(succeeded())
    assert sealed(receipt).attempt_id.epoch == 2
    bench.assert_right(bench.rows(sealed(receipt)), by_row(prompts))
    assert not old.exists() or list(old.iterdir()) == []


def test_late_rows_of_an_older_epoch_end_in_their_own_attempt_under_the_same_request_names(bench):
    """A zombie and its successor run the same unit at once, and the engine is told the same request names.

    The zombie's answers are captured, so that a row that went astray would show.
    """
    prompts = random_ids([100, 90, 80, 70], vocab_size=bench.vocab_size, seed=4)
    answers_of = Generate(max_tokens=40)

    async def both() -> tuple[list[UnitSealed | UnitFailed], list[Answer]]:
        zombie = await bench.open(prompts)
        zombie.name = "same"
        late = [zombie.start(row, answers_of) for row in range(len(prompts))]
        await until(lambda: meter("num_requests_running") == len(prompts))
        heir = await bench.open(prompts, unit=zombie.attempt_id.unit, epoch=2)
        heir.name = "same"
        await asyncio.gather(*(heir.run(row) for row in range(len(prompts))))
        answers = await asyncio.gather(*late)
        return [await zombie.receipt(), await heir.receipt()], answers

    (old, new), answers = bench.loop.call(both())
    bench.assert_right(bench.rows(sealed(old)), by_row(prompts, answers))
    bench.assert_right(bench.rows(sealed(new)), by_row(prompts))


def test_request_names_repeated_across_jobs_do_not_mix_their_rows(bench):
    mine = random_ids([60, 61, 62], vocab_size=bench.vocab_size, seed=5)
    yours = random_ids([61, 60, 300], vocab_size=bench.vocab_size, seed=6)

    async def both() -> list[UnitSealed | UnitFailed]:
        attempts = [await bench.open(prompts) for prompts in (mine, yours)]
        for attempt in attempts:
            attempt.name = "same"
        await asyncio.gather(*(attempt.run(row) for attempt in attempts for row in range(3)))
        return [await attempt.receipt() for attempt in attempts]

    for receipt, prompts in zip(bench.loop.call(both()), (mine, yours), strict=True):
        bench.assert_right(bench.rows(sealed(receipt)), by_row(prompts))


def greedy(bench: Bench, ids: list[int], prompt_tokens: int) -> list[int]:
    """Return what the model itself says after each token from the prompt's last one on."""
    (states,) = bench.truth([ids])
    said = head_of(bench.spec.weights).logprobs(states[8][prompt_tokens - 1 :])
    return [int(token) for token in said.argmax(dim=1)]


@functools.cache
def head_of(weights: Path) -> Head:
    return Head.load(weights, "float32")


def test_greedy_answers_are_the_models_own_even_where_they_repeat_a_token(bench):
    """The speculator drafts the last token again, so a repetition is the one draft that can be accepted."""
    prompts = random_ids([10 + row for row in range(24)], vocab_size=bench.vocab_size, seed=7)
    _, rows, answers = bench.capture(prompts, generate=Generate(max_tokens=32))
    said = [answer.token_ids for answer in answers]
    assert sum(one == other for ids in said for one, other in itertools.pairwise(ids)) >= 5
    bench.assert_right(rows, by_row(prompts, answers))
    for row, ids in enumerate(said):
        assert greedy(bench, rows[row]["input_ids"], len(prompts[row])) == list(ids), row


@pytest.mark.skipif(ON_CUDA, reason="a GPU draws")
def test_answers_at_a_temperature_are_refused_by_the_cpu_build_and_captured_right_once_it_is_mended(bench):
    """1. The build's kernel leaves the temperature unset, so the service refuses. 2. The test mends it.

    3. Every state is the model's, for tokens that are not the model's first choice.
    """
    prompts = random_ids([5, 31, 32, 33, 64], vocab_size=bench.vocab_size, seed=8)
    told = Generate(max_tokens=48, temperature=1.3, top_p=0.95, top_k=200)
    about = bench.engine.info
    with pytest.raises(EngineRefused) as caught:
        bench.loop.call(bench.engine.run(Prompt("refused", tuple(prompts[0]), None, generate=told)))
    assert caught.value.field == "generate.temperature"
    bench.loop.call(ask(bench, "mend_sampling"))
    bench.engine.info = about.model_copy(update={"device": "a mended cpu"})
    _, rows, answers = bench.capture(prompts, generate=told)
    bench.engine.info = about
    bench.assert_right(rows, by_row(prompts, answers))
    for row, answer in enumerate(answers):
        assert greedy(bench, rows[row]["input_ids"], len(prompts[row])) != list(answer.token_ids)


def test_an_answer_of_one_token_adds_no_state_to_its_prompt(bench):
    """The last sampled token was never an input."""
    prompts = random_ids([20, 32], vocab_size=bench.vocab_size, seed=9)
    _, rows, answers = bench.capture(prompts, generate=Generate(max_tokens=1))
    assert [len(answer.token_ids) for answer in answers] == [1, 1]
    bench.assert_right(rows, by_row(prompts))


def test_an_answer_that_ends_at_once_is_captured_as_its_prompt(bench):
    """The model's first token is one of those that end an answer."""
    _, rows, (answer,) = bench.capture([ENDS_AT_ONCE], generate=Generate(max_tokens=50))
    assert len(answer.token_ids) == 1
    bench.assert_right(rows, {0: ENDS_AT_ONCE})
