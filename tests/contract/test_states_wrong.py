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


def test_a_worker_with_wrong_states_leaves_the_job_to_a_healthy_one(
    tmp_path: Path, target: Path, url: str
) -> None:
    shop = Shop.open(tmp_path, target, database_url=url, engine_rest_s=36.0, unit_max_samples=5)
    job_id = shop.submit(request(target, conversations(SAMPLES)))
    shop.plan()
    wrong = shop.settings.model_copy(update={"engine": f"{__name__}:{WrongEngine.__name__}"})
    said: list[str] = []

    async def both() -> None:
        loops = [Capture(shop.store, wrong, "wrong"), Capture(shop.store, shop.settings, "healthy")]
        running = [asyncio.create_task(loop.run()) for loop in loops]
        await until(lambda: shop.store.read(jobs.job, job_id).progress.is_captured)
        said.extend(one.problem.type for one in shop.store.read(workers.sick))
        for loop in loops:
            loop.stop.set()
        await asyncio.gather(*running)

    asyncio.run(asyncio.wait_for(both(), 120))
    shop.publish()
    assert shop.store.read(jobs.state, job_id) is JobState.COMPLETED
    assert_whole(shop, job_id, written=SAMPLES, rejected=0)
    assert {row.attempts for row in shop.store.read(units.of_job, job_id)} == {1}
    assert said in (["urn:quarry:states-wrong"], [])
    shop.store.close()
