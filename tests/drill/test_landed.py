"""A shard that changes between its commit and the manifest."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.dataset.manifest import SealedShard, ShardEntry
from schemas.dataset.seal import sha256_of
from schemas.job import JobState, JobSummary
from service.publish import digests
from service.store import jobs
from tests.drill.damage import shard_of
from tests.drill.harness import Caught, assert_caught
from tests.drill.table import PLANTS, Stage
from tests.support import file_plants as plants
from tests.support.jobs import Shop, conversations, request
from tests.support.tiny_model import random_target


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    random_target(tmp_path / "models" / "target", hidden=64, max_position=512)
    shop = Shop.open(tmp_path, tmp_path / "models" / "target")
    yield shop
    shop.store.close()


def published_with_a_flipped_bit(shop: Shop) -> JobSummary:
    """1. Capture; the shards land. 2. One bit of a state is flipped. 3. Publish."""
    (target,) = shop.settings.model_roots
    job_id = shop.submit(request(target / "target", conversations(12)))
    shop.plan()
    shop.capture(job_id)
    plants.flip_state(shard_of(shop.settings.dataset_dir(job_id)))
    shop.publish()
    return shop.store.read(jobs.job, job_id)


def test_a_committed_shard_that_changed_is_never_in_a_manifest(shop: Shop) -> None:
    job = published_with_a_flipped_bit(shop)
    assert job.state is JobState.FAILED
    assert job.problem is not None
    (plant,) = (plant for plant in PLANTS if plant.stage is Stage.LANDED)
    assert_caught(plant, Caught(job.problem.type.removeprefix("urn:quarry:"), job.problem.detail))


def test_the_drill_fails_without_the_check(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(dataset: Path, shard: SealedShard, known: ShardEntry | None) -> ShardEntry:
        return ShardEntry(**shard.model_dump(), sha256=sha256_of(dataset / shard.path)[0])

    monkeypatch.setattr(digests, "_entry", unchecked)
    assert published_with_a_flipped_bit(shop).state is JobState.COMPLETED
