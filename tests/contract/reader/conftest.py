"""Finished datasets of the fake engine, whose every state is known."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.job import JobState
from tests.support.api import api_settings, serving, stored
from tests.support.finished_job import JOB, a_request, run_to_publishing
from tests.support.followed import ROWS, UNITS, Followed
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


@pytest.fixture
def uncollected() -> Iterator[None]:
    """As in a trainer that turns off Python's garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    """A job of which nothing is captured yet."""
    settings = api_settings(tmp_path)
    with stored(settings) as store, serving(settings) as api:
        made = Followed(settings, store, api)
        run_to_publishing(store, made.dataset, JOB, a_request(), num_units=UNITS, rows=ROWS, captured=0)
        yield made
