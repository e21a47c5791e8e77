"""A service that ends while it pushes: nothing is committed any more, and the next publisher completes it."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.job import JobState
from schemas.names import manifest_path, shard_path
from schemas.request import HubTarget
from service.publish.hub import Patience
from service.publish.publisher import run_publishing
from service.publish.push import UPLOAD_GROUP_FILES
from service.settings import Settings
from service.store import Store
from tests.support.desk import REPO, TOKEN, etags, writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import JOB, OWNER, a_request, norm_of, run_to_publishing
from tests.support.store_cases import Clock

STALE = shard_path(JOB, 9)
"""A shard that an earlier push left, and that no manifest names."""


class Press:
    """A job that is ready to be published, and the publishers that take it one after the other."""

    def __init__(self, root: Path, hub: FakeHub, units: int) -> None:
        self.hub = hub
        self.clock = Clock()
        self.settings = Settings(data_dir=root / "data", hub_endpoint=hub.url, hub_token=TOKEN)
        self.store = Store(self.settings.database(), self.clock.of(self.settings.database()))
        self.store.migrate()
        request = a_request(HubTarget(repo_id=REPO))
        run_to_publishing(self.store, self.settings.dataset_dir(JOB), JOB, request, units=units)

    def publish(self, stop: threading.Event) -> JobState:
        """Publish until `stop`, under a lease of its own; return the job's state."""
        self.clock.advance(self.settings.lease_s + 1)
        patience = Patience(attempts=3, sleep=lambda _: None)
        assert run_publishing(
            self.store, self.settings, OWNER, stop.is_set, final_norm=norm_of, patience=patience
        )
        return self.store.state(JOB)

    def titles(self) -> list[str]:
        return [commit.title for commit in self.hub.repo(REPO).commits]


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
    assert press.publish(stop) is JobState.PUBLISHING
    assert press.titles() == ["initial commit"]
    assert manifest_path(JOB) not in hub.repo(REPO).head.tree
    assert hub.calls["preupload"] == 1
    assert press.publish(threading.Event()) is JobState.COMPLETED
    assert press.titles() == ["initial commit", f"Add {JOB}"]
    pushed = {path for path in hub.repo(REPO).head.tree if path != ".gitattributes"}
    assert pushed == etags(press.settings.dataset_dir(JOB)).keys()
    # The card is not uploaded: the commit itself holds it.
    assert math.ceil(len(pushed - {"README.md"}) / UPLOAD_GROUP_FILES) == groups
    press.store.close()


def test_a_service_that_ends_before_stale_files_are_deleted_leaves_them(tmp_path: Path, hub: FakeHub) -> None:
    """1. A push that never landed left a shard. 2. Ours begins and is told to end. 3. Another deletes it."""
    press = Press(tmp_path, hub, units=2)
    hub.add_repo(REPO, {STALE: b"of no manifest"}, private=True)
    stop = threading.Event()
    hub.meanwhile("auth_check", stop.set)
    assert press.publish(stop) is JobState.PUBLISHING
    assert press.titles() == ["initial commit"]
    assert STALE in hub.repo(REPO).head.tree
    assert press.publish(threading.Event()) is JobState.COMPLETED
    assert press.titles() == ["initial commit", f"Remove stale files of {JOB}", f"Add {JOB}"]
    assert STALE not in hub.repo(REPO).head.tree
    press.store.close()
