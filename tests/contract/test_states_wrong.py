"""A worker whose engine computes wrong states leaves the job to another one, whose states are right."""

import asyncio
from pathlib import Path

from schemas.job import JobState
from service.store import jobs, units, workers
from tests.contract.test_jobs import assert_whole
from tests.support.engine_bench import until
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop, conversations, request
from tests.support.roles import Capture

SAMPLES = 200


class WrongEngine(FakeEngine):
    """Its device stores another last layer of each sixth request than the one whose logits it returns."""

    def _compute(self, token_ids: list[int], blocks: list[int]) -> None:
        super()._compute(token_ids, blocks)
        if self.requests % 6 == 5:
            self._cache[blocks[-1], -1] *= -1


class AlwaysWrongEngine(FakeEngine):
    """Whatever it computes is not what the model would."""

    started = 0

    def __init__(self) -> None:
        super().__init__()
        AlwaysWrongEngine.started += 1

    def _compute(self, token_ids: list[int], blocks: list[int]) -> None:
        super()._compute(token_ids, blocks)
        self._cache[blocks[-1], -1] *= -1


def test_a_model_whose_states_are_wrong_in_every_unit_fails_its_job_at_the_second_engine(
    tmp_path: Path, target: Path, url: str
) -> None:
    shop = Shop.open(tmp_path, target, database_url=url, engine_rest_s=36.0, unit_max_samples=5)
    shop.settings = shop.settings.model_copy(update={"engine": f"{__name__}:{AlwaysWrongEngine.__name__}"})
    before = AlwaysWrongEngine.started
    job = shop.run(request(target, conversations(SAMPLES)))
    assert job.state is JobState.FAILED and job.problem is not None
    assert job.problem.type == "urn:quarry:states-wrong"
    assert AlwaysWrongEngine.started - before in (2, 3), "a third may start beside the second"
    shop.store.close()


def test_a_worker_with_wrong_states_leaves_the_job_to_a_healthy_one(
    tmp_path: Path, target: Path, url: str
) -> None:
    shop = Shop.open(tmp_path, target, database_url=url, engine_rest_s=36.0, unit_max_samples=5)
    job_id = shop.submit(request(target, conversations(SAMPLES)))
    shop.plan()
    wrong = shop.settings.model_copy(update={"engine": f"{__name__}:{WrongEngine.__name__}"})

    async def both() -> None:
        loops = [Capture(shop.store, shop.settings, "healthy"), Capture(shop.store, wrong, "wrong")]
        running = [asyncio.create_task(loops[0].run())]
        await until(lambda: "healthy" in shop.store.read(workers.present))
        running.append(asyncio.create_task(loops[1].run()))
        await until(lambda: shop.store.read(jobs.job, job_id).progress.is_captured)
        for loop in loops:
            loop.stop.set()
        await asyncio.gather(*running)

    asyncio.run(asyncio.wait_for(both(), 120))
    shop.publish()
    assert shop.store.read(jobs.state, job_id) is JobState.COMPLETED
    assert_whole(shop, job_id, written=SAMPLES, rejected=0)
    rows = shop.store.read(units.of_job, job_id)
    assert {row.attempts for row in rows} == {1} and max(row.epoch for row in rows) > 1
    shop.store.close()
