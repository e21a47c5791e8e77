"""What becomes of an engine that gave wrong states."""

from schemas.job import JobState
from service.store import jobs
from tests.drill.harness import LAYERS, NUM_SAMPLES, victims
from tests.support import planted_connector
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids
from tests.support.planted_connector import Order
from tests.support.plants import EXCHANGED
from tests.support.tiny_model import random_target


def test_an_engine_that_gave_wrong_states_is_not_used_again(tmp_path, monkeypatch):
    """1. Two rows of a job hold each other's states. 2. Another job runs the same rows, and is right.

    The engine's memory holds the wrong pairs of token and state by then: only a new engine can take the rows.
    """
    target = random_target(tmp_path / "models" / "target", hidden=64, max_position=512)
    monkeypatch.setenv(planted_connector.ORDER, str(tmp_path / "plant.json"))
    shop = Shop.open(
        tmp_path,
        target,
        engine="tests.drill.harness:PlantedEngine",
        unit_attempts=1,
        units_in_flight=1,
        units_in_proof=0,
    )
    samples = [
        {"id": f"s{row}", "token_ids": ids}
        for row, ids in enumerate(random_ids([40] * NUM_SAMPLES, vocab_size=1500))
    ]
    body = request(target, samples, layers=LAYERS[:-1], storage={"shard_bytes": 4_194_304})
    first, second = shop.submit(body, "first"), shop.submit(body, "second")
    shop.plan()
    row, other = victims(shop, first)
    Order(EXCHANGED, str(target), row, other, first).save()
    shop.capture(second)
    shop.capture(first)
    shop.publish()
    assert [shop.store.read(jobs.job, job_id).state for job_id in (first, second)] == [
        JobState.FAILED,
        JobState.COMPLETED,
    ]
    shop.store.close()
