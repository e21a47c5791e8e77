"""Rows with NaN: a device that fails loses no sample, and a model that overflows on one ends the job."""

import asyncio
import json
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.job import JobState
from service.capture import not_finite
from service.capture.engine import Answer, Prompt
from service.proof.canary import canary_prompts
from service.store import commits, jobs, units, workers
from tests.contract.test_jobs import assert_whole
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import FAKE_ENGINE, Shop, conversations, request
from tests.support.nights import names, open_nights
from tests.support.roles import capture_beside, sweep

UNIT = 5
SAMPLES = 20


class FailingEngine(FakeEngine):
    """Its device yields NaN from the fourth request on, but for a row's last token."""

    failing = sys.maxsize
    """Of the engines that are started, the first ones; the device is well then."""
    started = 0

    def __init__(self) -> None:
        super().__init__()
        FailingEngine.started += 1
        self._fails = FailingEngine.started <= self.failing

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        states_LTH = super()._states(token_ids)
        if self._fails and self.requests > 3:
            states_LTH[:, :-1] = float("nan")
        return states_LTH


class OverflowingEngine(FakeEngine):
    """Its model overflows on rows of these lengths in tokens."""

    overflows: Container[int] = ()
    started = 0

    def __init__(self) -> None:
        super().__init__()
        OverflowingEngine.started += 1

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        states_LTH = super()._states(token_ids)
        if len(token_ids) in self.overflows:
            states_LTH[:, :-1] = float("inf")
        return states_LTH


class UnlikeEngine(OverflowingEngine):
    """Each one answers in another order, and finds another number of tokens not finite."""

    async def run(self, prompt: Prompt) -> Answer:
        place = len(prompt.token_ids) % UNIT
        await asyncio.sleep(0.01 * (place if OverflowingEngine.started % 2 else UNIT - place))
        return await super().run(prompt)

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        states_LTH = FakeEngine._states(self, token_ids)
        if len(token_ids) in self.overflows:
            states_LTH[:, OverflowingEngine.started % 4 : -1] = float("inf")
        return states_LTH


class OverflowingTokenEngine(OverflowingEngine):
    """Its model overflows on rows with one of these tokens."""

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        states_LTH = FakeEngine._states(self, token_ids)
        if any(token in self.overflows for token in token_ids):
            states_LTH[:] = float("inf")
        return states_LTH


class DrawingEngine(OverflowingEngine):
    """Each one gives other answers, on some of which its model overflows, as on some prompts."""

    def _sample(self, prompt: Prompt) -> list[int]:
        if prompt.generate is None:
            return super()._sample(prompt)
        first = sum(prompt.token_ids) * 7 + OverflowingEngine.started * 13
        return [(first + index) % 50 + 1 for index in range(prompt.generate.max_tokens)]

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        states_LTH = FakeEngine._states(self, token_ids)
        if self._is_ill(token_ids):
            states_LTH[:, torch.tensor(token_ids).cumsum(0) % 61 == 0] = float("inf")
        return states_LTH

    def _is_ill(self, token_ids: list[int]) -> bool:
        return True


class DrawingIllEngine(DrawingEngine):
    """Its device is ill in place of the model: the same tokens are finite once more."""

    def __init__(self) -> None:
        super().__init__()
        self._met: list[list[int]] = []

    def _is_ill(self, token_ids: list[int]) -> bool:
        is_new = not any(token_ids[: len(met)] == met for met in self._met)
        self._met.append(token_ids)
        return is_new


def named(engine: type[FakeEngine]) -> str:
    return f"{__name__}:{engine.__name__}"


@pytest.fixture
def shop(tmp_path: Path, target: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(FailingEngine, "started", 0)
    monkeypatch.setattr(OverflowingEngine, "started", 0)
    opened = Shop.open(tmp_path, target, database_url=url, engine_rest_s=36.0, unit_max_samples=UNIT)
    yield opened
    opened.store.close()


def use(shop: Shop, engine: type[FakeEngine]) -> None:
    shop.settings = shop.settings.model_copy(update={"engine": named(engine)})


def rows_of(lengths: range) -> list[dict[str, object]]:
    """Return a sample of each length."""
    return [{"id": f"s{n}", "token_ids": [20 + n, *range(1, n)]} for n in lengths]


def test_a_device_that_fails_once_loses_no_sample(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingEngine, "failing", 1)
    use(shop, FailingEngine)
    job = shop.run(request(target, conversations(SAMPLES)))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=SAMPLES, rejected=0)
    assert FailingEngine.started == 2


def test_a_device_that_fails_with_every_engine_blocks_the_job_and_a_resume_loses_no_sample(
    shop: Shop, target: Path
) -> None:
    """1. Three engines of the only worker yield NaN, the second for the same rows. 2. It is mended."""
    use(shop, FailingEngine)
    job = shop.run(request(target, rows_of(range(6, 6 + SAMPLES)), loss="all"))
    assert job.state is JobState.BLOCKED and job.problem is not None
    assert job.problem.type == "urn:quarry:states-not-finite"
    assert "rows are not finite" in job.problem.detail
    assert job.problem.cure is not None and job.problem.cure.startswith("check the GPU")
    assert job.problem.cure.endswith("; then resume")
    assert job.progress.samples_rejected == job.progress.units_failed == 0
    shop.settings = shop.settings.model_copy(update={"engine": FAKE_ENGINE})
    shop.store.write(jobs.resume, job.id)
    assert shop.finish(job.id).state is JobState.COMPLETED
    assert_whole(shop, job.id, written=SAMPLES, rejected=0)


@pytest.mark.slow
def test_a_worker_whose_device_fails_leaves_the_job_to_a_healthy_one(shop: Shop, target: Path) -> None:
    job_id = shop.submit(request(target, conversations(8 * SAMPLES)))
    shop.plan()
    failing = shop.settings.model_copy(update={"engine": named(FailingEngine)})
    capture_beside(shop.store, job_id, shop.settings, failing)
    shop.publish()
    assert_whole(shop, job_id, written=8 * SAMPLES, rejected=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "overflows"),
    [
        (OverflowingEngine, {7}),
        (OverflowingEngine, set(range(6, 11))),
        (UnlikeEngine, {7, 8, 13, 19, 27}),
        (UnlikeEngine, set(range(6, 11))),
    ],
    ids=["one", "unit", "each", "unit, otherwise"],
)
def test_a_model_that_overflows_ends_with_those_samples_rejected_by_the_second_engine(
    shop: Shop,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: type[OverflowingEngine],
    overflows: set[int],
) -> None:
    """Whatever number of units has such a row, two engines are enough; a third may start beside the second.

    A unit may have no other row.
    """
    monkeypatch.setattr(OverflowingEngine, "overflows", overflows)
    use(shop, engine)
    job = shop.run(request(target, rows_of(range(6, 31)), loss="all"))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=25 - len(overflows), rejected=len(overflows))
    rejects = shop.store.read(commits.rejects, job.id)
    assert {(reject.source_id, reject.reason) for reject in rejects} == {
        (f"s{length}", "not-finite") for length in overflows
    }
    assert OverflowingEngine.started <= 3
    assert {row.attempts for row in shop.store.read(units.of_job, job.id)} == {1}


def test_a_model_that_overflows_on_a_token_of_the_canarys_is_no_failing_device(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit has no other row. The token is among the first of the canary's prompts, which begin alike."""
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    token = canary_prompts(vocab_size, 17)[1][5]
    monkeypatch.setattr(OverflowingEngine, "overflows", {token})
    use(shop, OverflowingTokenEngine)
    samples = [{"id": f"s{n}", "token_ids": [token, *range(1, n)]} for n in range(6, 6 + UNIT)]
    job = shop.run(request(target, samples + rows_of(range(11, 16)), loss="all"))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=UNIT, rejected=UNIT)


def test_an_engine_whose_control_fails_leaves_a_finding_for_the_next_one_to_confirm(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A model overflows on a sample. 2. The second engine's device fails at the control. 3. It is well."""
    monkeypatch.setattr(OverflowingEngine, "overflows", {7})
    use(shop, OverflowingEngine)
    capture, failing = not_finite.capture_prompts, iter([True])

    async def captured(*given: Any) -> Any:
        return [{}] if next(failing, False) else await capture(*given)

    monkeypatch.setattr(not_finite, "capture_prompts", captured)
    job = shop.run(request(target, rows_of(range(6, 11)), loss="all"))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=4, rejected=1)
    assert OverflowingEngine.started == 3


@pytest.mark.parametrize(("engine", "completes"), [(DrawingEngine, True), (DrawingIllEngine, False)])
def test_answers_on_which_a_model_overflows_need_not_be_the_same_rows_twice(
    shop: Shop, target: Path, engine: type[FakeEngine], completes: bool
) -> None:
    """Each engine overflows on other answers. An ill device does not find the same tokens so once more."""
    shop.settings = shop.settings.model_copy(update={"unit_max_samples": 40})
    use(shop, engine)
    questions = [f"Question {number} {'so ' * (number % 7)}" for number in range(40)]
    samples = [
        {"id": f"q{n}", "messages": [{"role": "user", "content": asked}]} for n, asked in enumerate(questions)
    ]
    job = shop.run(request(target, samples, generate={"max_tokens": 7, "temperature": 0.9}))
    if not completes:
        assert job.state is JobState.BLOCKED and job.problem is not None
        assert "rows are not finite" in job.problem.detail
        assert job.progress.samples_rejected == 0
        return
    assert job.state is JobState.COMPLETED, job.problem
    rejected = job.progress.samples_rejected
    assert rejected > 0
    assert_whole(shop, job.id, written=40 - rejected, rejected=rejected)
    assert OverflowingEngine.started <= 3


@pytest.mark.parametrize("kind", ["file", "posted"])
def test_a_sample_that_is_not_finite_comes_again_the_next_night(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """1. Samples are rejected as not finite. 2. The next night the engine is well: they are written once."""
    monkeypatch.setattr(workers, "PAUSES", (0.0, 0.0, 1.0))
    monkeypatch.setattr(OverflowingEngine, "overflows", range(50, 512))
    request = {"source": {"kind": "posted"}} if kind == "posted" else {}
    nights = open_nights(tmp_path, target, f"sqlite:///{tmp_path / 'quarry.db'}", request=request)
    bring = nights.drop if kind == "file" else lambda numbers: nights.post(*numbers)
    bring(range(12))
    use(nights.shop, OverflowingEngine)
    nights.night()
    progress = nights.job().progress
    lost = progress.samples_rejected
    assert 0 < lost < 12 and progress.samples_written == 12 - lost
    nights.shop.settings = nights.shop.settings.model_copy(update={"engine": FAKE_ENGINE})
    for written in (lost, 0):
        sweep(nights.store, nights.shop.settings)
        nights.night()
        assert nights.job().progress.samples_written == written
    assert nights.once() == names(range(12))
    assert kind == "file" or not nights.waiting()
    nights.store.close()
