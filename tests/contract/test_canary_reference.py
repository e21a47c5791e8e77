"""The canary's reference runs beside the engine's start, once, and within what the memory allows."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from schemas.job import JobState
from service.capture import canary
from service.capture.engine import EngineSpec
from service.capture.link import EngineLink
from service.capture.loop import Capture
from service.errors import EngineRefused
from service.proof.reference import reference_states
from service.settings import Settings
from tests.support.engine_bench import until
from tests.support.jobs import Shop, request
from tests.support.model_engine import ModelEngine
from tests.support.plans import random_ids
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
ASKED: list[str] = []
"""What was asked for, in its order, by the job of the test that runs."""
LAYERS = (1, 2)


class PatientEngine(ModelEngine):
    """Is up only when the reference has been asked for."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await until(lambda: "reference" in ASKED)
        await super().start(spec, settings, link)
        ASKED.append("engine")


class PlainEngine(ModelEngine):
    """Says when it is up."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await super().start(spec, settings, link)
        ASKED.append("engine")


class BrokenEngine(ModelEngine):
    """Does not start, once the reference runs."""

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        await until(lambda: "reference" in ASKED)
        raise EngineRefused("it never would", field="model")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return random_target(folder, arch="qwen3", layers=4, hidden=64, dtype="bfloat16", max_position=256)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Note when the reference is asked for and ends; return the bounds that it was given."""
    bounds: list[int | None] = []

    async def states(*given: Any, max_bytes: int | None, **more: Any) -> Any:
        ASKED.append("reference")
        bounds.append(max_bytes)
        try:
            return await reference_states(*given, max_bytes=max_bytes, **more)
        finally:
            ASKED.append("ended")

    ASKED.clear()
    monkeypatch.setattr(canary, "reference_states", states)
    return bounds


def open_shop(folder: Path, target: Path, engine: type[ModelEngine], **settings: Any) -> Shop:
    name = f"{__name__}:{engine.__name__}"
    return Shop.open(folder, target, engine=name, unit_attempts=1, **settings)


def a_request(target: Path) -> Any:
    samples = [{"id": str(n), "token_ids": ids} for n, ids in enumerate(random_ids([9, 40], vocab_size=1500))]
    return request(target, samples, layers=LAYERS, canary="run")


def test_the_reference_runs_while_the_engine_starts(tmp_path, target, asked):
    job = open_shop(tmp_path, target, PatientEngine).run(a_request(target))
    assert job.state is JobState.COMPLETED, job.problem
    assert len(asked) == 1, "it is run once"


def test_states_that_passed_before_are_not_computed_ahead(tmp_path, target):
    shop = open_shop(tmp_path, target, PlainEngine)
    assert shop.run(a_request(target)).state is JobState.COMPLETED
    ASKED.clear()
    assert shop.run(a_request(target), "again").state is JobState.COMPLETED
    assert ASKED == ["engine"], "the same engine again: its canary is remembered"


def test_a_reference_without_room_beside_the_start_is_run_when_the_engine_is_up(
    tmp_path, target, asked, monkeypatch
):
    monkeypatch.setattr(canary, "_EARLY_SHARE", 2**62)
    job = open_shop(tmp_path, target, PatientEngine).run(a_request(target))
    assert job.state is JobState.COMPLETED, job.problem
    assert asked == [0, None]


def test_the_operators_bound_is_not_tried_twice(tmp_path, target, asked):
    job = open_shop(tmp_path, target, PatientEngine, canary_max_bytes=1000).run(a_request(target))
    assert job.problem is not None
    assert "1000 are allowed" in job.problem.detail
    assert asked == [1000]


def test_an_engine_that_does_not_start_leaves_no_reference_behind(tmp_path, target):
    shop = open_shop(tmp_path, target, BrokenEngine)
    job_id = shop.submit(a_request(target))
    shop.plan()
    capture = Capture(shop.store, shop.settings, "worker", only_job=job_id)
    asyncio.run(asyncio.wait_for(capture.run(), PATIENCE_S))
    assert shop.store.job(job_id).state is JobState.FAILED
    assert ASKED == ["reference", "ended"]
