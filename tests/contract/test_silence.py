"""An engine that answers nothing is given up: by its units, by the canary, and while it starts."""

import asyncio
from pathlib import Path

import pytest

from schemas.job import JobState
from service.capture import vllm_start
from service.capture.engine import Answer, EngineSpec, Prompt
from service.capture.link import EngineLink
from service.errors import EngineDied
from service.settings import Settings
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop, conversations, request
from tests.support.model_engine import ModelEngine

SILENCE_S = 5.0
"""Far longer than a healthy fake engine takes for an answer, on a loaded machine too."""
SHORT_SILENCE_S = 0.5
"""For an engine that never answers: no healthy one is judged by it."""


def hang_first(monkeypatch: pytest.MonkeyPatch, kind: type[FakeEngine]) -> list[FakeEngine]:
    """Let the first engine that is asked something answer nothing, ever; return those that were asked."""
    asked: list[FakeEngine] = []
    run = kind.run

    async def hanging(self: FakeEngine, prompt: Prompt) -> Answer:
        if self not in asked:
            asked.append(self)
        if self is asked[0]:
            await asyncio.Event().wait()
        return await run(self, prompt)

    monkeypatch.setattr(kind, "run", hanging)
    return asked


def test_units_of_an_engine_that_hangs_run_again_on_another(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hang_first(monkeypatch, FakeEngine)
    shop = Shop.open(tmp_path, target, engine_silence_s=SILENCE_S, units_in_flight=2)
    job = shop.run(request(target, conversations(30)))
    assert job.state is JobState.COMPLETED, job.problem
    assert job.progress.samples_written == 30
    assert len(asked) == 2
    shop.store.close()


def test_a_canary_that_is_never_answered_says_so(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hanging(self: ModelEngine, prompt: Prompt) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError("it was answered")

    monkeypatch.setattr(ModelEngine, "run", hanging)
    engine = "tests.support.model_engine:ModelEngine"
    shop = Shop.open(tmp_path, target, engine=engine, engine_silence_s=SHORT_SILENCE_S, engine_rest_s=600.0)
    job = shop.run(request(target, conversations(2), layers=(1, 2), canary="run"))
    assert job.state is JobState.BLOCKED
    assert job.problem is not None
    assert job.problem.type == "urn:quarry:engine-stuck"
    assert job.problem.cure is not None
    assert "QUARRY_ENGINE_SILENCE_S" in job.problem.cure
    shop.store.close()


@pytest.mark.engine
def test_a_start_that_takes_too_long_is_ended(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service.capture.vllm_engine import VllmEngine

    ended: list[bool] = []

    class EndlessStart(vllm_start.VllmStart[object]):
        def __init__(self, build: object) -> None:
            """Start nothing."""

        async def built(self) -> object:
            return await asyncio.Event().wait()

        async def end(self) -> None:
            ended.append(True)

    monkeypatch.setattr("service.capture.vllm_engine.VllmStart", EndlessStart)
    settings = Settings(data_dir=tmp_path, engine_start_timeout_s=0.2)
    spec = EngineSpec(target, "r", "bfloat16", (1, 2), 64, 64, decode=False)

    async def given_up() -> None:
        engine, link = VllmEngine(), EngineLink()
        with pytest.raises(EngineDied, match=r"did not start .* within 0 s") as died:
            await engine.start(spec, settings, link)
        assert "QUARRY_ENGINE_START_TIMEOUT_S" in str(died.value.cure)
        await engine.stop()

    asyncio.run(asyncio.wait_for(given_up(), 120))
    assert ended == [True]
