"""Finished datasets of the fake engine, whose every state is known."""

from pathlib import Path

import pytest

from schemas.job import JobState
from tests.support.jobs import Shop, conversations, request

NUM_SAMPLES = 40


def finished(folder: Path, target: Path, **changes: object) -> Path:
    """Run a job to its end and return its dataset's folder."""
    shop = Shop.open(folder, target)
    try:
        job = shop.run(request(target, conversations(NUM_SAMPLES), **changes))
        assert job.state is JobState.COMPLETED, job.problem
        return shop.settings.dataset_dir(job.id)
    finally:
        shop.store.close()


@pytest.fixture(scope="session", params=["none", "planes"])
def compression(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def dataset(tmp_path_factory, target, compression) -> Path:
    storage = {"shard_bytes": 262_144, "compression": compression}
    return finished(tmp_path_factory.mktemp("dataset"), target, storage=storage)


@pytest.fixture(scope="session")
def plain(tmp_path_factory, target) -> Path:
    """A dataset without planes."""
    return finished(tmp_path_factory.mktemp("plain"), target)


@pytest.fixture(scope="session")
def lossy(tmp_path_factory, target) -> Path:
    """A dataset of codes and scales."""
    storage = {"shard_bytes": 262_144, "compression": "fp8"}
    return finished(tmp_path_factory.mktemp("lossy"), target, storage=storage)
