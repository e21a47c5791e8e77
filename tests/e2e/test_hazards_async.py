"""Asynchronous scheduling, which vLLM's CPU build never turns on by itself, forced on; and the second runner.

Prefill is right under it. Decoding is not, with the installed runner: after a repeated token it loses count.
So the service turns it off for answers, and refuses an engine of that runner that turns it on again.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.dataset.states import StoredState
from schemas.generate import Generate
from schemas.receipts import UnitFailed
from service.capture.engine import EngineSpec
from service.capture.engine_options import check_started
from service.capture.link import EngineLink
from service.errors import EngineRefused
from service.proof.head import Head
from service.proof.logit_check import LogitCase, check_logits
from service.settings import Settings
from tests.support.engine_bench import Bench, by_row
from tests.support.plans import random_ids
from tests.support.real_engine import TOLERANCE, early_gather, vllm_bench
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.engine

LAYERS = (2, 4, 8)
MAX_LEN = 512
OPTIONS = {
    "block_size": 32,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 160,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("async") / "qwen3", dtype="float32", max_position=MAX_LEN)


@pytest.fixture(scope="module")
def forced(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """An engine that schedules asynchronously whatever it is told, started for prefill alone."""
    from vllm.platforms.cpu import CpuPlatform

    real = CpuPlatform.check_and_update_config

    def and_then_async(config):
        real(config)
        config.scheduler_config.async_scheduling = True

    with early_gather(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(and_then_async))
        with vllm_bench(
            tmp_path_factory.mktemp("data"),
            target,
            layers=LAYERS,
            max_len=MAX_LEN,
            decode=False,
            engine_options=OPTIONS,
        ) as bench:
            assert bench.engine.info.options["async_scheduling"]
            yield bench


def test_prefill_is_captured_right_under_asynchronous_scheduling(forced):
    head, *alone = random_ids([200, 1, 31, 32, 33, 96, 97, 300, MAX_LEN - 1], vocab_size=1500, seed=1)
    prompts = [*alone, head, head + alone[1], head[:64], head]
    for _ in range(2):
        _, rows, _ = forced.capture(prompts)
        forced.assert_right(rows, by_row(prompts))


def test_decoding_under_asynchronous_scheduling_is_wrong_and_so_it_is_refused(forced):
    """Each answer is a unit of its own. Some are refused: slots were never stored. Some are only wrong.

    Once this engine decodes rightly, this test fails, and the rule against it can go.
    """
    head = Head.load(forced.spec.weights, "float32")
    prompts = random_ids([10 + row for row in range(36)], vocab_size=1500, seed=2)
    refused, wrong, proven = 0, 0, 0
    for prompt in prompts:

        async def alone(prompt=prompt):
            attempt = await forced.open([prompt])
            return await attempt.run(0, Generate(max_tokens=30)), await attempt.receipt()

        answer, receipt = forced.loop.call(alone())
        if isinstance(receipt, UnitFailed):
            assert receipt.reason == "states-wrong"
            refused += 1
            continue
        rows = forced.rows(receipt)
        if forced.errors(rows)[0] > TOLERANCE:
            wrong += 1
            last = StoredState(forced.states(rows[0], LAYERS[-1])[-1], None)
            proven += bool(check_logits(head, [LogitCase("it", answer.likely, last)]).faults)
    print(
        f"of 36 answers {refused} were refused, {wrong} only wrong; the logit check finds {proven} of these"
    )
    assert refused + wrong > 0
    with pytest.raises(EngineRefused, match="async_scheduling"):
        check_started(forced.engine.info, decode=True, max_model_len=1, max_num_scheduled_tokens=None)


@pytest.mark.parametrize(
    ("decode", "options", "told"),
    [(True, {}, False), (False, {}, None), (True, {"async_scheduling": True}, True)],
)
def test_the_service_turns_it_off_for_answers_alone_unless_it_is_asked_for(
    target, tmp_path, decode, options, told
):
    from service.capture.vllm_engine import engine_arguments

    spec = EngineSpec(target, "r", "float32", LAYERS, 128, MAX_LEN, decode=decode)
    link = EngineLink()
    arguments = engine_arguments(spec, Settings(data_dir=tmp_path, engine_options=options), link)
    asyncio.run(link.close())
    assert arguments.get("async_scheduling") is told


def test_the_second_model_runner_is_refused_where_it_cannot_run(target, tmp_path, monkeypatch):
    """It needs Triton, which the CPU build does without; forced on, the engine says so before it starts."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    bench = vllm_bench(tmp_path, target, layers=LAYERS, max_len=MAX_LEN, engine_options=OPTIONS)
    with pytest.raises(EngineRefused, match="Model Runner V2 requires Triton"), bench:
        pass


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ({"pipeline_parallel_size": 2}, "TENSOR_PARALLEL"),
        ({"max_num_batched_token": 64}, "max_num_batched_tokens"),
    ],
)
def test_an_option_that_cannot_be_made_right_is_refused_before_the_engine_starts(
    target, tmp_path, option, cure
):
    bench = vllm_bench(tmp_path, target, layers=LAYERS, max_len=MAX_LEN, engine_options=option)
    with pytest.raises(EngineRefused) as caught, bench:
        pass
    (name,) = option
    assert caught.value.field == f"QUARRY_ENGINE_OPTIONS.{name}"
    assert cure in str(caught.value.cure)
