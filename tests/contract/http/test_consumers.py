"""The consumers of a job: a shard goes once all of them have it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select, update

from service.settings import Settings
from service.store import Store, consumers, jobs
from service.store.consumers import MAX_CONSUMERS
from service.store.tables import CONSUMER
from tests.support.api import complete, job_body, problem_of
from tests.support.roles import sweep


@pytest.fixture
def consumed(api: httpx2.Client, model: Path, store: Store, settings: Settings) -> str:
    """A job of three units whose shards lie in the data folder."""
    body = job_body(model, storage={"retention": "consumed"})
    job_id = str(api.post("/extract", json=body).json()["id"])
    complete(store, job_id, num_units=3)
    for unit in api.get(f"/jobs/{job_id}/units").json()["units"]:
        for shard in unit["shards"]:
            path = settings.dataset_dir(job_id) / shard["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"a shard")
    return job_id


def left(settings: Settings, job_id: str) -> int:
    return len(list((settings.dataset_dir(job_id) / "data" / job_id).glob("*.parquet")))


def test_shards_go_once_every_consumer_has_them(
    api: httpx2.Client, consumed: str, settings: Settings, store: Store
):
    """1. One has two units. 2. The other has one. 3. It is removed. 4. The first says no less than before."""
    units = f"/jobs/{consumed}/units"
    places = [api.get(units, params={"limit": limit}).json()["next_after"] for limit in (1, 2)]
    base = f"/jobs/{consumed}/consumers"
    for name in ("rank-0", "rank-1"):
        assert api.put(f"{base}/{name}", json={}).status_code == 204
    assert api.put(f"{base}/rank-0", json={"after": places[1]}).status_code == 204
    assert left(settings, consumed) == 3
    assert api.put(f"{base}/rank-1", json={"after": places[0]}).status_code == 204
    assert left(settings, consumed) == 2
    told = api.get(base).json()["consumers"]
    assert [(one["name"], one["place"]) for one in told] == [("rank-1", places[0]), ("rank-0", places[1])]
    assert api.delete(f"{base}/rank-1").status_code == 204
    assert left(settings, consumed) == 1
    api.put(f"{base}/rank-0", json={"after": places[0]})
    assert api.get(base).json()["consumers"][0]["place"] == places[1]
    shown = [(unit["in_folder"], unit["in_repository"]) for unit in api.get(units).json()["units"]]
    assert shown == [(False, False), (False, False), (True, False)]
    progress = store.read(jobs.job, consumed).progress
    assert (progress.units_stored, 3 * progress.bytes_gone) == (2, 2 * progress.bytes_written)
    problem_of(api.delete(f"{base}/rank-1"), 404)


def test_shards_that_could_not_be_removed_go_with_a_sweep_though_no_consumer_is_left(
    api: httpx2.Client, consumed: str, settings: Settings, store: Store
):
    base, last = f"/jobs/{consumed}/consumers", api.get(f"/jobs/{consumed}/units").json()["next_after"]
    store.write(consumers.acknowledge, consumed, "one", last, None)
    assert api.delete(f"{base}/one").status_code == 204
    assert left(settings, consumed) == 3
    sweep(store, settings)
    assert left(settings, consumed) == 0


def test_a_consumer_that_is_silent_for_longer_than_it_wanted_is_waited_for_no_longer(
    api: httpx2.Client, consumed: str, settings: Settings, store: Store
):
    """1. One has all, another nothing. 2. It is forgotten by a sweep after its time."""
    base, last = f"/jobs/{consumed}/consumers", api.get(f"/jobs/{consumed}/units").json()["next_after"]
    api.put(f"{base}/gone", json={"expires_s": 60})
    api.put(f"{base}/there", json={"after": last})
    sweep(store, settings)
    assert left(settings, consumed) == 3
    an_hour_later(store, consumed, "gone")
    sweep(store, settings)
    assert left(settings, consumed) == 0
    assert [one["name"] for one in api.get(base).json()["consumers"]] == ["there"]


def test_a_consumer_is_heard_whose_units_cannot_be_moved_into_place(
    api: httpx2.Client, consumed: str, settings: Settings, store: Store
):
    """A file of a unit that a crash left unmoved cannot be: what is acknowledged is refused until then."""
    base, last = f"/jobs/{consumed}/consumers", api.get(f"/jobs/{consumed}/units").json()["next_after"]
    api.put(f"{base}/slow", json={"expires_s": 60})
    api.put(f"{base}/there", json={"after": last})
    (settings.work_root / consumed / "attempts" / "00000-1").mkdir(parents=True)
    next((settings.dataset_dir(consumed) / "data" / consumed).glob("*.parquet")).unlink()
    an_hour_later(store, consumed, "slow")
    problem_of(api.put(f"{base}/slow", json={"expires_s": 60}), 503)
    store.write(consumers.expire, consumed)
    assert [one["name"] for one in api.get(base).json()["consumers"]] == ["slow", "there"]


def an_hour_later(store: Store, job_id: str, consumer: str) -> None:
    """Let it be an hour since a consumer was heard; the service has been there all the time."""
    mine = CONSUMER.c.job_id == job_id, CONSUMER.c.name == consumer
    with store.writing() as tx:
        expires_at = tx.connection.scalars(select(CONSUMER.c.expires_at).where(*mine)).one()
        assert expires_at is not None
        tx.connection.execute(
            update(CONSUMER).where(*mine).values(expires_at=expires_at - timedelta(hours=1))
        )


def test_what_cannot_be_acknowledged_is_refused_by_field(api: httpx2.Client, consumed: str, model: Path):
    base = f"/jobs/{consumed}/consumers"
    assert problem_of(api.put(f"{base}/a", json={"after": 2**40}), 422).field == "after"
    assert problem_of(api.put(f"{base}/NO", json={}), 422).field == "name"
    for number in range(MAX_CONSUMERS):
        assert api.put(f"{base}/rank-{number}", json={}).status_code == 204
    assert problem_of(api.put(f"{base}/one-more", json={}), 409).field == "name"
    assert api.put(f"{base}/rank-0", json={}).status_code == 204
    kept = api.post("/extract", json=job_body(model)).json()["id"]
    problem = problem_of(api.put(f"/jobs/{kept}/consumers/a", json={}), 409)
    assert (problem.field, "retention" in str(problem.cure)) == ("job_id", True)
    both: dict[str, Any] = {"storage": {"retention": "consumed"}, "hub": {"repo_id": "org/states"}}
    assert problem_of(api.post("/extract", json=job_body(model, **both)), 422).detail
