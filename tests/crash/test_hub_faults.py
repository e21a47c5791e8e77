"""Two jobs are pushed to one repository, and one call of the Hub goes wrong: every call, every fault.

The client is the real one, in LFS and in xet mode, and the publisher is the service's own, on a real store.
A case is one call of the undisturbed push and one fault; or an outage: a whole endpoint that is faulty until
the first publisher has given its job back. Nobody repairs anything by hand, and afterwards the repository,
the local folders and the commits are those of the undisturbed push.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from schemas.names import CARD_PATH, manifest_path
from schemas.request import HubTarget
from service.settings import Settings
from service.store import Store, migration
from tests.crash.conftest import chosen
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import JOB, OTHER_JOB, a_request, run_to_publishing
from tests.support.hub_client import HubClient, Mode
from tests.support.hub_state import Fault, Token
from tests.support.hub_storage import LfsStorage, XetStorage

JOBS = (JOB, OTHER_JOB)
ROWS = 3
PART_BYTES = 4096
"""The larger files of these jobs are uploaded in two or three parts, everything else in one."""
SILENCE_S = 1.0
ANSWER_S = 200.0
"""A publisher that has not come back by then hangs."""
PUBLISHERS = 6

COMMON = {"create": 1, "auth_check": 2, "info": 10, "paths_info": 28, "tree": 8, "resolve": 12}
COMMON |= {"preupload": 7, "validate": 2, "commit": 4}
LFS = {"lfs_batch": 5, "lfs_put": 2, "lfs_part": 10, "lfs_complete": 4, "lfs_verify": 6}
XET = {"xet_write_token": 5, "cas_chunk": 6, "cas_grant": 4, "cas_put": 4, "cas_xorb_commit": 4}
XET |= {"cas_shard": 5, "cas_telemetry": 5}
CALLS: dict[Mode, dict[str, int]] = {"lfs": COMMON | LFS, "xet": COMMON | XET}
"""The undisturbed push: how often it calls what."""

FAULTS = {
    "429": Fault(status=429, headers={"Retry-After": "7"}),
    **{str(status): Fault(status=status) for status in (500, 502, 503, 504, 409, 412)},
    "reset": Fault(drop="reset"),
    "stall": Fault(drop="stall"),
    "lost": Fault(drop="after"),
}


class Case(NamedTuple):
    mode: Mode
    endpoint: str
    nth: int
    fault: str
    times: int = 1

    @property
    def name(self) -> str:
        when = f"call-{self.nth}" if self.times == 1 else "outage"
        return f"{self.mode}-{self.endpoint}-{when}-{self.fault}"


CASES = [
    Case(mode, endpoint, nth, fault, times)
    for mode, calls in CALLS.items()
    for endpoint, count in calls.items()
    for nth, times in [*((nth, 1) for nth in range(1, count + 1)), (1, 10_000)]
    for fault in FAULTS
]


@dataclass
class Outcome:
    """What a push has left."""

    tree: dict[str, str]
    titles: list[str]
    local: dict[str, str]


@dataclass
class Stand:
    """A Hub and a client of one mode."""

    hub: FakeHub
    client: HubClient
    template: Path
    undisturbed: Outcome = field(init=False)

    def push(self, data: Path, fault: Callable[[], None] = lambda: None) -> Outcome:
        """Push both jobs from a copy of the template, as often as a publisher is needed."""
        self.hub.forget()
        self.hub.calls.clear()
        shutil.copytree(self.template, data)
        fault()
        for lease in range(PUBLISHERS):
            said = self.client.ask(
                "publish", ANSWER_S, data_dir=str(data), endpoint=self.hub.url, token=TOKEN, lease=lease
            )
            assert "error" not in said, said
            self.hub.heal()
            states = {job["state"] for job in said["jobs"].values()}
            assert states <= {"running", "publishing", "completed"}, said
            if states == {"completed"}:
                break
        else:
            raise AssertionError(said)
        commits = self.hub.repo(REPO).commits
        return Outcome(
            {path: blob.etag for path, blob in commits[-1].tree.items()},
            [commit.title for commit in commits],
            {path.relative_to(data).as_posix(): sha256(path) for path in (data / "jobs").rglob("*.*")},
        )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs whose units are done."""
    folder = tmp_path_factory.mktemp("template")
    settings = Settings(data_dir=folder)
    store = Store(settings.database())
    store.write(migration.migrate)
    for job_id in JOBS:
        request = a_request(HubTarget(repo_id=REPO))
        run_to_publishing(store, settings.dataset_dir(job_id), job_id, request, num_units=1, rows=ROWS)
    store.close()
    return folder


@pytest.fixture(scope="module")
def stand_of(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mode], Stand]]:
    stands: dict[Mode, Stand] = {}
    with ExitStack() as stack:

        def stand_of(mode: Mode) -> Stand:
            if mode not in stands:
                cas = XetStorage() if mode == "xet" else None
                hub = stack.enter_context(FakeHub(cas=cas, lfs=LfsStorage(PART_BYTES)))
                hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
                home = tmp_path_factory.mktemp(mode)
                client = stack.enter_context(HubClient(mode, home, silence_s=SILENCE_S))
                stand = Stand(hub, client, template)
                stand.undisturbed = stand.push(home / "undisturbed")
                assert dict(hub.calls) == CALLS[mode], "these are the calls that this test knows"
                stands[mode] = stand
            return stands[mode]

        yield stand_of


def assert_whole_at_every_commit(stand: Stand) -> None:
    """A manifest, and the job's part of the card, come with the last of the job's files."""
    for commit in stand.hub.repo(REPO).commits:
        card = commit.tree.get(CARD_PATH)
        listed = card.content.decode() if card is not None and card.content is not None else ""
        for job_id in JOBS:
            files = {path for path in stand.undisturbed.tree if job_id in path}
            has_manifest = manifest_path(job_id) in commit.tree
            assert (job_id in listed) == has_manifest
            assert not has_manifest or files <= commit.tree.keys()


def samples_of(stand: Stand, data: Path) -> Counter[str]:
    """Return how often a sample is in the repository's shards, as their sha256 tells."""
    shards = {sha256(path): path for path in (data / "jobs").rglob("data/*/*.parquet")}
    samples: Counter[str] = Counter()
    for blob in stand.hub.repo(REPO).head.tree.values():
        if blob.etag in shards:
            samples.update(pq.read_table(shards[blob.etag], columns=["sample_id"])["sample_id"].to_pylist())
    return samples


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in chosen("hub faults", CASES, sample=400, short=6)]
)
def test_a_fault_of_the_hub_changes_nothing_in_the_end(
    stand_of: Callable[[Mode], Stand], tmp_path: Path, case: Case, tally: Counter[str]
) -> None:
    stand = stand_of(case.mode)
    tally[f"faults of the Hub ({case.fault})"] += 1
    fault = replace(FAULTS[case.fault], nth=case.nth, times=case.times)
    after = stand.push(tmp_path / "data", lambda: stand.hub.fail(case.endpoint, fault))
    assert stand.hub.calls[case.endpoint] >= case.nth, "the fault was not met"
    assert after == stand.undisturbed
    assert samples_of(stand, tmp_path / "data") == {f"{j}-0-{row}": 1 for j in JOBS for row in range(ROWS)}
    assert_whole_at_every_commit(stand)
