"""Wrong states: those of one engine are captured again on another; those of two fail the job."""

from pathlib import Path

import pytest

from schemas.job import JobState
from service.store import jobs, units
from tests.contract.test_jobs import assert_whole
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import capture_beside

SAMPLES = 200


class WrongEngine(FakeEngine):
    """Its device stores another last layer of each sixth request than the one whose logits it returns."""

    every = 6

    def _compute(self, token_ids: list[int], blocks: list[int]) -> None:
        super()._compute(token_ids, blocks)
        if self.requests % self.every == self.every - 1:
            self._cache[blocks[-1], -1] *= -1


class AlwaysWrongEngine(WrongEngine):
    """It stores another last layer of every request."""

    every = 1
    started = 0

    def __init__(self) -> None:
        super().__init__()
        AlwaysWrongEngine.started += 1


def test_a_model_whose_states_are_wrong_in_every_unit_fails_its_job_at_the_second_engine(
    tmp_path: Path, target: Path, url: str
) -> None:
    shop = Shop.open(tmp_path, target, database_url=url, engine_rest_s=36.0, unit_max_samples=5)
    shop.settings = shop.settings.model_copy(update={"engine": f"{__name__}:{AlwaysWrongEngine.__name__}"})
    before = AlwaysWrongEngine.started
    job = shop.run(request(target, conversations(SAMPLES)))
    assert job.state is JobState.FAILED and job.problem is not None
    assert job.problem.type == "urn:quarry:states-wrong" and "row" in job.problem.detail
    assert not list(shop.settings.dataset_dir(job.id).glob("manifests/*"))
    assert AlwaysWrongEngine.started - before in (2, 3), "a third may start beside the second"
    shop.store.close()


def test_states_that_one_engine_gets_wrong_are_captured_again_on_another(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, third = FakeEngine._compute, iter([False, False, True])

    def compute(self: FakeEngine, token_ids: list[int], blocks: list[int]) -> None:
        healthy(self, token_ids, blocks)
        if next(third, False):
            self._cache[blocks[-1], -1] *= -1

    monkeypatch.setattr(FakeEngine, "_compute", compute)
    job = shop.run(request(target, conversations(20)))
    assert job.state is JobState.COMPLETED, job.problem
    assert_whole(shop, job.id, written=20, rejected=0)
    assert max(row.epoch for row in shop.store.read(units.of_job, job.id)) > 1


@pytest.mark.slow
def test_a_worker_with_wrong_states_leaves_the_job_to_a_healthy_one(
    tmp_path: Path, target: Path, url: str
) -> None:
    shop = Shop.open(tmp_path, target, database_url=url, engine_rest_s=36.0, unit_max_samples=5)
    job_id = shop.submit(request(target, conversations(SAMPLES)))
    shop.plan()
    wrong = shop.settings.model_copy(update={"engine": f"{__name__}:{WrongEngine.__name__}"})

    capture_beside(shop.store, job_id, shop.settings, wrong)
    shop.publish()
    assert shop.store.read(jobs.state, job_id) is JobState.COMPLETED
    assert_whole(shop, job_id, written=SAMPLES, rejected=0)
    rows = shop.store.read(units.of_job, job_id)
    assert {row.attempts for row in rows} == {1} and max(row.epoch for row in rows) > 1
    shop.store.close()
