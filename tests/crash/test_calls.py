"""A fault at the n-th file or database call of plan, seal, commit, move and completion.

A life of the service meets the fault: SIGKILL, EIO, ENOSPC, or SIGSTOP for longer than its leases. Then it is
started again until the job is complete, and nothing else is done. A job that a full disk blocked is resumed,
which is what its error asks for. In the end the dataset has the names and the bytes of an undisturbed run.
"""

import os
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from service.host import HOST_FILE
from service.settings import Settings
from service.store import Store, hosts
from tests.crash.conftest import chosen
from tests.crash.faults import COMPLETED, LOOK_S, scratch_of
from tests.crash.house import OF_HUB, STAGES, House
from tests.crash.oracle import JOB, TIMED, tree
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.hub_state import Token
from tests.support.roles import sweep

FAULTS = ("kill", "EIO", "ENOSPC")


def locked(settings: Settings) -> bool:
    """Say whether a stopped process holds SQLite's one lock; on PostgreSQL it would lose it in a while."""
    with closing(sqlite3.connect(settings.data_dir / "quarry.db", timeout=0)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in OF_HUB])
def test_a_fault_at_the_nth_call_loses_and_doubles_nothing(
    house: House, tally: Counter[str], stage: str, kind: str
) -> None:
    for n in chosen(f"{stage} {kind}", range(1, house.count(stage, kind) + 1), sample=8):
        settings, life = house.begin(stage, kind, n)
        status, hit = life.end(), life.hit()
        print(f"{stage} {kind} {n} at {hit and (hit.operation, hit.path, hit.other)}: {status}")
        house.assert_finishes(settings, status)
        tally[kind] += hit is not None
        shutil.rmtree(settings.data_dir.parent)


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("stage", ["plan", "seal", "index", "move", "complete"])
def test_a_life_that_stood_still_past_its_lease_changes_nothing(
    house: House, tally: Counter[str], stage: str
) -> None:
    """1. SIGSTOP at the n-th call. 2. Another life takes over and completes the job. 3. SIGCONT."""
    for n in chosen(f"{stage} stop", range(1, house.count(stage, "stop") + 1), sample=4):
        settings, life = house.begin(stage, "stop", n)
        while life.process.is_alive() and not life.stopped():
            time.sleep(LOOK_S)
        print(f"{stage} stop {n} at {life.hit()}")
        if life.process.is_alive() and not locked(settings):
            house.assert_finishes(settings)
            os.kill(life.process.pid, signal.SIGCONT)
            assert life.end() == COMPLETED, settings.data_dir.with_suffix(".log").read_text()
            # A publisher that comes back may write its file once more, with the same bytes.
            assert tree(settings.dataset_dir(JOB)) == house.tree
            tally["stop"] += 1
        elif life.process.is_alive():
            os.kill(life.process.pid, signal.SIGCONT)
            house.assert_finishes(settings, life.end())
        shutil.rmtree(settings.data_dir.parent)


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add_token(TOKEN, Token("me", orgs={"org": "write"}))
        yield hub


@pytest.fixture(scope="module")
def pushing(house: House, hub: FakeHub) -> House:
    return House(house.folder / "pushing", {"hub": {"repo_id": REPO}}, hub_endpoint=hub.url, hub_token=TOKEN)


@pytest.fixture(scope="module")
def away(house: House, hub: FakeHub) -> House:
    place = {"hub_endpoint": hub.url, "hub_token": TOKEN}
    return House(house.folder / "away", {"hub": {"repo_id": REPO}}, away=True, **place)


def untimed(hub: FakeHub) -> dict[str, Any]:
    """Return the repository's files; of those that say when the job was captured only that they are there."""
    files = hub.repo(REPO).commits[-1].tree
    return {path: None if path in TIMED else blob for path, blob in files.items()}


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("kind", ["kill", "EIO"])
def test_a_fault_at_the_nth_call_of_a_push_leaves_the_same_repository(
    pushing: House, hub: FakeHub, tally: Counter[str], kind: str
) -> None:
    """The file and socket calls of the publisher; what the Hub itself does wrong is in `test_hub_faults`."""
    hub.forget()
    num_calls = pushing.count("push", kind)
    undisturbed = untimed(hub)
    for n in chosen(f"push {kind}", range(1, num_calls + 1), sample=12):
        hub.forget()
        settings, life = pushing.begin("push", kind, n)
        status, hit = life.end(), life.hit()
        print(f"push {kind} {n} at {hit and (hit.operation, hit.path, hit.other)}: {status}")
        pushing.assert_finishes(settings, status)
        assert untimed(hub) == undisturbed
        tally[f"{kind} of a push"] += hit is not None
        shutil.rmtree(settings.data_dir.parent)


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(36_000)
@pytest.mark.parametrize("kind", ["kill", "EIO", "lost"])
@pytest.mark.parametrize("stage", ["store", "store-database"])
def test_a_fault_at_the_nth_call_of_storing_on_a_machine_leaves_the_same_repository(
    away: House, hub: FakeHub, tally: Counter[str], stage: str, kind: str
) -> None:
    """Upload, commit, the transaction that ends the units, and what goes then.

    A machine that is lost is killed there, its scratch is gone, and it is forgotten.
    """
    hub.forget()
    fault = "kill" if kind == "lost" else kind
    num_calls = away.count(stage, fault)
    undisturbed = untimed(hub)
    for n in chosen(f"{stage} {kind}", range(1, num_calls + 1), sample=6):
        hub.forget()
        settings, life = away.begin(stage, fault, n)
        status, hit = life.end(), life.hit()
        print(f"{stage} {kind} {n} at {hit and (hit.operation, hit.path, hit.other)}: {status}")
        if kind == "lost":
            lose(settings)
        away.assert_finishes(settings, status)
        assert untimed(hub) == undisturbed
        with closing(Store(settings.database())) as store:
            sweep(store, scratch_of(settings))
        assert not list(scratch_of(settings).work_root.iterdir())
        tally[f"{kind} of storing"] += hit is not None
        shutil.rmtree(settings.data_dir.parent)


def lose(settings: Settings) -> None:
    """Lose the machine that captures, and give it up."""
    scratch = scratch_of(settings).data_dir
    with closing(Store(settings.database())) as store:
        store.write(hosts.forget, (scratch / HOST_FILE).read_text())
    shutil.rmtree(scratch)
