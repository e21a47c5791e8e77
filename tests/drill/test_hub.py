"""Failures on the way to the Hub and in the repository: the real client against a local server."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.artifacts.dataset_files import HubFiles
from service.proof.verify import verify_dataset
from tests.drill.damage import shard_of
from tests.drill.harness import Caught, assert_caught, findings
from tests.drill.table import PLANTS, Plant, Stage
from tests.support import file_plants as plants
from tests.support.fake_hub import FakeHub
from tests.support.hub_client import HubClient
from tests.support.hub_state import Token

REPO, SECRET = "team/states", "hf_drill"
IN_THE_REPOSITORY: dict[str, Callable[[Path], None]] = {
    "bit-on-the-hub": plants.flip_state,
    "cut-on-the-hub": plants.cut,
    "gone-from-the-hub": Path.unlink,
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add_token(SECRET, Token("team"))
        yield hub


def plant_of(name: str) -> Plant:
    return next(plant for plant in PLANTS if plant.stage is Stage.HUB and plant.name == name)


def test_a_shard_that_changed_before_the_push_is_never_published(hub, dataset, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    plants.flip_state(shard_of(copy))
    with HubClient("lfs", tmp_path / "home", hub.url) as client:
        said = client.ask(
            "push", folder=str(copy), endpoint=hub.url, token=SECRET, hub={"repo_id": REPO, "private": False}
        )
    caught = Caught(said["type"].removeprefix("urn:quarry:"), said["detail"])
    assert_caught(plant_of("before-the-push"), caught)
    assert len(hub.repo(REPO).commits) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IN_THE_REPOSITORY])
def test_a_shard_that_changed_in_the_repository_is_named(hub, dataset, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    IN_THE_REPOSITORY[name](shard_of(copy))
    files = [path for path in copy.rglob("*") if path.is_file()]
    hub.add_repo(REPO, {path.relative_to(copy).as_posix(): path.read_bytes() for path in files})
    remote = HubFiles(REPO, endpoint=hub.url, token=SECRET)
    assert_caught(plant_of(name), findings(verify_dataset(remote)))
