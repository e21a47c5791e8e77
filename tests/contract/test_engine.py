"""One conformance suite for everything that fills `service.capture.engine.Engine`.

The tests' engine and vLLM's CPU build.

Each test captures rows through the real connector and reads the sealed file back. The truth is the fake's
pure function, or a transformers forward pass of the same weights.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from connector.wire import RowRef
from schemas.names import attempt_dir
from schemas.receipts import AbandonUnit, UnitFailed, UnitKey, UnitSealed
from schemas.request import Generate
from service.capture.engine import Answer, Engine, EngineSpec, Prompt, PromptRefused
from service.capture.link import EngineLink
from service.proof.head import Head
from service.settings import Settings
from tests.support.fake_engine import FakeEngine, states_TH
from tests.support.loop_thread import LoopThread
from tests.support.plans import JOB, identity, order, random_ids, write_plan
from tests.support.tiny_model import random_target

LAYERS = (2, 4, 8)
MAX_LEN = 512
POOL_BYTES = 2**20
"""Holds one row of the longest length and little more, so that every test runs against a full pool."""


@dataclass
class Bench:
    """A started engine and what is known of it."""

    engine: Engine
    link: EngineLink
    settings: Settings
    weights: Path
    loop: LoopThread
    truth: Callable[[list[int], int], torch.Tensor]
    tolerance: float
    hidden_size: int
    vocab_size: int
    units: int = 0

    def capture(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        generate: Generate | None = None,
        cancel: frozenset[int] = frozenset(),
        skip: frozenset[int] = frozenset(),
    ) -> tuple[UnitSealed, dict[int, dict[str, object]], list[Answer | None]]:
        """Run one unit; return its receipt, its stored rows by plan row, and the answers."""
        about = identity(layer_ids=LAYERS, hidden_size=self.hidden_size, dtype="float32")
        self.units += 1
        unit = self.units
        write_plan(self.settings.work_root, prompts, unit=unit)
        told = order(about, len(prompts), unit=unit)

        async def one(row: int) -> Answer | None:
            ids = tuple(prompts[row])
            if row in skip:
                await self.link.skip(told.key, row, "a test")
                return None
            task = asyncio.create_task(
                self.engine.run(
                    Prompt(
                        f"u{unit}-{row}",
                        ids,
                        RowRef(told.key, row, len(ids)),
                        witness=True,
                        generate=generate,
                    )
                )
            )
            if row in cancel:
                await asyncio.sleep(0.05)  # long enough to be in the engine, far too short to be through it
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return None
            return await task

        async def unit_run() -> tuple[tuple[UnitSealed | UnitFailed, ...], list[Answer | None]]:
            await self.link.open(told)
            answers = await asyncio.gather(*(one(row) for row in range(len(prompts))))
            return await self.link.receipts(told.key), answers

        receipts, answers = self.loop.call(unit_run())
        (receipt,) = receipts
        assert isinstance(receipt, UnitSealed), receipt
        rows: dict[int, dict[str, object]] = {}
        if receipt.file is not None:
            table = pq.read_table(self.settings.work_root / attempt_dir(JOB, unit, 1) / receipt.file)
            rows = dict(zip(receipt.rows, table.to_pylist(), strict=True))
        return receipt, rows, answers

    def assert_right(self, rows: dict[int, dict[str, object]], ids: dict[int, list[int]]) -> None:
        """Every layer of every row is the model's."""
        assert rows.keys() == ids.keys()
        for row, stored in rows.items():
            assert stored["input_ids"] == ids[row]
            for layer_id in LAYERS:
                states = torch.frombuffer(bytearray(stored[f"layer_{layer_id}"]), dtype=torch.float32)
                states = states.view(len(ids[row]), self.hidden_size)
                truth = self.truth(ids[row], layer_id)
                error = float((states - truth).norm(dim=1).div(truth.norm(dim=1)).max())
                assert error <= self.tolerance, (row, layer_id, error)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(
        tmp_path_factory.mktemp("target") / "qwen3",
        arch="qwen3",
        layers=8,
        hidden=128,
        dtype="float32",
        max_position=MAX_LEN,
    )


@pytest.fixture(scope="module", params=["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def bench(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    norm_inputs: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda _, given: norm_inputs.__setitem__("states", given[0]))

    @torch.no_grad()
    def forward(token_ids: list[int], layer_id: int) -> torch.Tensor:
        said = model(torch.tensor([token_ids]), output_hidden_states=True)
        return norm_inputs["states"][0] if layer_id == 8 else said.hidden_states[layer_id][0]

    def pure(token_ids: list[int], layer_id: int) -> torch.Tensor:
        return states_TH(token_ids, layer_id, 128, "float32")

    if request.param == "vllm":
        from service.capture.vllm_engine import VllmEngine

        engine: Engine = VllmEngine()
    else:
        engine = FakeEngine()
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("data"),
        pool_bytes=POOL_BYTES,
        engine_options={"enforce_eager": True, "max_num_batched_tokens": 128, "max_num_seqs": 16},
    )
    spec = EngineSpec(target, "r", "float32", LAYERS, 128, MAX_LEN, decode=True)
    loop = LoopThread()

    async def start() -> EngineLink:
        link = EngineLink()
        await link.listen()
        await engine.start(spec, settings, link)
        return link

    link = loop.call(start())
    truth, tolerance = (forward, 2e-5) if request.param == "vllm" else (pure, 0.0)
    yield Bench(engine, link, settings, target, loop, truth, tolerance, 128, model.config.vocab_size)

    async def stop() -> None:
        await engine.stop()
        await link.close()

    loop.call(stop())
    loop.close()


def by_row(prompts: Sequence[list[int]]) -> dict[int, list[int]]:
    return dict(enumerate(prompts))


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


def test_an_aborted_request_is_a_void_row_and_the_others_are_right(bench):
    prompts = random_ids([MAX_LEN - 1] * 12, vocab_size=bench.vocab_size, seed=4)
    if isinstance(bench.engine, FakeEngine):
        bench.engine.step_delay_s = 0.5
    receipt, rows, _ = bench.capture(prompts, cancel=frozenset({9, 11}))
    if isinstance(bench.engine, FakeEngine):
        bench.engine.step_delay_s = 0.0
    assert set(receipt.void) == {9, 11}
    bench.assert_right(rows, {row: ids for row, ids in by_row(prompts).items() if row not in {9, 11}})


def test_a_skipped_row_does_not_hold_the_unit(bench):
    prompts = random_ids([10, 11, 12], vocab_size=bench.vocab_size, seed=5)
    receipt, rows, _ = bench.capture(prompts, skip=frozenset({0}))
    assert receipt.void == ()
    bench.assert_right(rows, {1: prompts[1], 2: prompts[2]})


def test_an_answer_is_captured_with_its_prompt_but_for_the_last_sampled_token(bench):
    prompts = random_ids([1, 15, 127, 130, 40], vocab_size=bench.vocab_size, seed=6)
    _, rows, answers = bench.capture(prompts, generate=Generate(max_tokens=20))
    ids = {
        row: [*prompts[row], *answer.token_ids[:-1]]
        for row, answer in enumerate(answers)
        if answer is not None
    }
    assert all(len(answer.token_ids) == 20 for answer in answers if answer is not None)
    bench.assert_right(rows, ids)


def test_a_request_without_a_row_is_answered_and_not_captured(bench):
    (prompt,) = random_ids([20], vocab_size=bench.vocab_size, seed=7)
    answer = bench.loop.call(bench.engine.run(Prompt("alone", tuple(prompt), None)))
    assert len(answer.token_ids) == 1
    receipt, _, _ = bench.capture([prompt])
    assert receipt.rows == (0,)


def test_an_abandoned_attempt_leaves_no_file_and_the_next_one_is_right(bench):
    prompts = random_ids([30] * 4, vocab_size=bench.vocab_size, seed=8)
    about = identity(layer_ids=LAYERS, hidden_size=128, dtype="float32")
    unit = bench.units = bench.units + 1
    write_plan(bench.settings.work_root, prompts, unit=unit)
    key = UnitKey(job_id=JOB, unit=unit, epoch=1)

    async def half() -> None:
        await bench.link.open(order(about, len(prompts), unit=unit))
        await bench.engine.run(Prompt("half", tuple(prompts[0]), RowRef(key, 0, len(prompts[0]))))
        await bench.link.abandon(key)
        # A row of an attempt that is over: its blocks must come back all the same.
        await bench.engine.run(Prompt("late", tuple(prompts[1]), RowRef(key, 1, len(prompts[1]))))

    bench.loop.call(half())
    _, rows, _ = bench.capture(prompts)
    bench.assert_right(rows, by_row(prompts))
    folder = bench.settings.work_root / attempt_dir(JOB, unit, 1)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_the_witness_is_the_models_own_next_token(bench):
    prompts = random_ids([5, 50, 129], vocab_size=bench.vocab_size, seed=9)
    _, rows, answers = bench.capture(prompts)
    for row, answer in enumerate(answers):
        assert answer is not None and answer.next_token is not None
        last = torch.frombuffer(bytearray(rows[row]["layer_8"]), dtype=torch.float32).view(-1, 128)[-1:]
        logprobs = Head.load(bench.weights, "float32").logprobs(last)[0]
        assert int(logprobs.argmax()) == answer.next_token
        assert float(logprobs[answer.next_token]) == pytest.approx(answer.next_logprob, abs=1e-3)


def test_a_prompt_the_engine_cannot_run_is_refused_and_the_engine_lives_on(bench):
    bad = (13, 13, *range(MAX_LEN)) if isinstance(bench.engine, FakeEngine) else tuple([1] * (MAX_LEN + 5))
    with pytest.raises(PromptRefused):
        bench.loop.call(bench.engine.run(Prompt("bad", bad, None)))
    bench.loop.call(bench.engine.run(Prompt("good", (1, 2, 3), None)))


def test_a_message_of_the_protocol_is_one_line(bench):
    from schemas.receipts import TO_CONNECTOR, line

    said = line(AbandonUnit(key=UnitKey(job_id=JOB, unit=0, epoch=1)))
    assert said.count(b"\n") == 1
    assert isinstance(TO_CONNECTOR.validate_json(said), AbandonUnit)
