"""A publishing lease over a database that is away for a while, and at the end of the process."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.errors import DiskFull, LeaseLost, QuarryError, StoreUnavailable
from service.publish.lease_keeper import BEATS, LeaseKeeper
from service.store import PublishLease
from service.store.values import TaskKind
from tests.support.finished_job import JOB, OWNER, a_request, an_identity

ROOT = Path(__file__).parents[3]
AWAY, FULL = StoreUnavailable("away"), DiskFull("full")
LEASE = PublishLease(
    kind=TaskKind.PUBLISH,
    job_id=JOB,
    item=0,
    epoch=1,
    attempts=1,
    owner=OWNER,
    request=a_request(),
    identity=an_identity(),
    provenance=None,
)

ENDS_DURING_AN_UPLOAD = """
import threading
from types import SimpleNamespace
from service.publish.lease_keeper import LeaseKeeper

def upload():
    with LeaseKeeper(None, SimpleNamespace(job_id="j-1"), 600.0):
        uploading.set()
        threading.Event().wait()

uploading = threading.Event()
threading.Thread(target=upload, daemon=True).start()
uploading.wait()
"""


class Hiccups:
    """The store of a keeper: its extensions meet these one after the other, and then nothing."""

    def __init__(self, *met: Exception | None) -> None:
        self._met: Iterator[Exception | None] = iter(met)
        self.extensions = 0

    def extend(self, leases: list[PublishLease], ttl_s: float) -> list[PublishLease]:
        self.extensions += 1
        error = next(self._met, None)
        if isinstance(error, LeaseLost):
            return leases
        if error is not None:
            raise error
        return []


class Beats:
    """The event that the keeper's thread waits for: it comes after so many beats, each at once."""

    def __init__(self, num_beats: int) -> None:
        self._left = num_beats
        self._ended = threading.Event()
        self.over = threading.Event()
        self.set, self.is_set = self._ended.set, self._ended.is_set

    def wait(self, timeout: float) -> bool:
        if self._left:
            self._left -= 1
            return False
        self.over.set()
        return self._ended.wait(60)


def keeper_of(store: Hiccups, num_beats: int = 10) -> tuple[LeaseKeeper, Beats]:
    keeper, beats = LeaseKeeper(store, LEASE, 60.0), Beats(num_beats)
    keeper._done = beats
    return keeper, beats


@pytest.mark.parametrize("met", [[AWAY], [AWAY, FULL], [None, AWAY, AWAY, None, FULL, FULL]])
def test_a_lease_is_kept_over_a_database_that_is_away_for_less_than_it_lives(met) -> None:
    store = Hiccups(*met)
    keeper, beats = keeper_of(store)
    with keeper:
        assert beats.over.wait(60)
        keeper.check()
    assert store.extensions == 10


@pytest.mark.parametrize(
    "met",
    [[AWAY] * BEATS, [FULL] * BEATS, [AWAY, LeaseLost("lost")]],
    ids=["away for a whole lease", "full for a whole lease", "lost"],
)
def test_what_ends_a_lease_is_told(met: list[QuarryError]) -> None:
    store = Hiccups(*met)
    keeper, _ = keeper_of(store)
    with keeper:
        keeper._thread.join(60)
        with pytest.raises(type(met[-1])):
            keeper.check()
    assert store.extensions == len(met)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_keeper_that_ended_by_a_bug_keeps_nothing_and_says_so() -> None:
    keeper, _ = keeper_of(Hiccups(ZeroDivisionError("a bug")))
    with keeper:
        keeper._thread.join(60)
        with pytest.raises(QuarryError, match="no longer kept"):
            keeper.check()


def test_a_process_that_ends_during_an_upload_does_not_wait_for_its_keeper() -> None:
    subprocess.run([sys.executable, "-c", ENDS_DURING_AN_UPLOAD], cwd=ROOT, check=True, timeout=60)
