"""A service that ends while it pushes: nothing is committed any more, and the next publisher completes it."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.job import JobState
from schemas.names import manifest_path, shard_path
from service.publish.upload import GROUP_FILES
from tests.contract.publish.press import Press
from tests.support.desk import REPO, etags, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import JOB

STALE = shard_path(JOB, 9)
"""A shard that an earlier push left, and that no manifest names."""


def titles(hub: FakeHub) -> list[str]:
    return [commit.title for commit in hub.repo(REPO).commits]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.mark.parametrize(("units", "groups"), [(2, 1), (10, 3)], ids=["one group", "three groups"])
def test_a_service_that_ends_during_an_upload_sends_no_more_and_commits_nothing(
    tmp_path: Path, hub: FakeHub, units: int, groups: int
) -> None:
    """1. The first group of files is uploaded. 2. The service is told to end. 3. Another one completes it."""
    press = Press(tmp_path, hub, units)
    stop = threading.Event()
    hub.meanwhile("preupload", stop.set)
    assert press.publish(stopped=stop.is_set).state is JobState.PUBLISHING
    assert titles(hub) == ["initial commit"]
    assert manifest_path(JOB) not in hub.repo(REPO).head.tree
    assert hub.calls["preupload"] == 1
    assert press.publish().state is JobState.COMPLETED
    assert titles(hub) == ["initial commit", f"Add {JOB}"]
    pushed = {path for path in hub.repo(REPO).head.tree if path != ".gitattributes"}
    assert pushed == etags(press.settings.dataset_dir(JOB)).keys()
    # The card is not uploaded: the commit itself holds it.
    assert math.ceil(len(pushed - {"README.md"}) / GROUP_FILES) == groups
    press.store.close()


def test_a_service_that_ends_before_stale_files_are_deleted_leaves_them(tmp_path: Path, hub: FakeHub) -> None:
    """1. A push that never landed left a shard. 2. Ours begins and is told to end. 3. Another deletes it."""
    press = Press(tmp_path, hub, units=2)
    hub.add_repo(REPO, {STALE: b"of no manifest"}, private=True)
    stop = threading.Event()
    hub.meanwhile("auth_check", stop.set)
    assert press.publish(stopped=stop.is_set).state is JobState.PUBLISHING
    assert titles(hub) == ["initial commit"]
    assert STALE in hub.repo(REPO).head.tree
    assert press.publish().state is JobState.COMPLETED
    assert titles(hub) == ["initial commit", f"Add {JOB}"]
    assert STALE not in hub.repo(REPO).head.tree
    press.store.close()
