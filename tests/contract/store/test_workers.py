"""What a worker takes after its engine died, what it says, and whose fault a death is."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from schemas.identity import Identity
from schemas.job import JobState
from schemas.worker import WorkerStatus
from service.errors import EngineChanged, EngineDied, EngineRefused, QuarryError, StatesWrong
from service.store import HOME, Store, UnitLease, jobs, tasks, units, workers
from service.store.workers import PAUSES, Sickness, is_at_fault
from tests.support.store_cases import IDENTITY, TTL_S, Clock, commit, job_id, lease_unit, start_units

REST_S = 3600.0
SHORT_S, LONGER_S = (share * REST_S for share in PAUSES[:2])
DIED = EngineDied("why")
OTHER = IDENTITY.model_copy(update={"weights_sha256": "ab" * 32})
"""Another checkpoint under the same name."""


def die(store: Store, lease: UnitLease, error: QuarryError = DIED, **how: bool) -> list[Sickness]:
    """Let the engine of a lease's worker die, not alone unless said; return what is to be blocked."""
    how = {"alone": False, "sound": False} | how
    store.write(workers.engine_died, lease, error, REST_S, **how)
    return store.read(workers.untaken, lease.identity.model_sha256())


def fall_sick(store: Store, clock: Clock, owner: str, number: int = 1, deaths: int = 3) -> list[Sickness]:
    """Let the engine of a worker die on a job in a row; return what is to be blocked."""
    untaken: list[Sickness] = []
    for death in range(deaths):
        untaken = die(store, lease_unit(store, owner, job_id(number)))
        if death < deaths - 1:
            clock.advance(LONGER_S)
            store.write(workers.beat, owner, TTL_S)
    return untaken


@pytest.mark.parametrize(
    ("events", "deaths", "pause_s", "waits"),
    [
        ("d", 1, SHORT_S, False),
        ("dd", 2, LONGER_S, False),
        ("ddd", 3, REST_S, True),
        ("dddd", 4, REST_S, True),
        ("dp", 0, 0.0, False),
        ("ddpd", 1, SHORT_S, False),
        ("dddpddd", 3, REST_S, True),
    ],
)
def test_pauses_grow_with_deaths_in_a_row_and_a_proven_unit_ends_the_row(
    store: Store, clock: Clock, events: str, deaths: int, pause_s: float, waits: bool
) -> None:
    start_units(store, len(events) + 1)
    store.write(workers.beat, "another", 10 * REST_S)
    for event in events:
        clock.advance(REST_S)
        lease = lease_unit(store, "one")
        if event == "p":
            assert lease.is_probe
            commit(store, lease)
        else:
            die(store, lease)
    assert [one.deaths for one in store.read(workers.sick)] == [deaths] * (deaths > 0)
    assert store.read(jobs.job, job_id(1)).waits is not None or not waits
    if deaths:
        clock.advance(pause_s - 0.1)
        assert units.lease(store, "one", TTL_S) is None
        clock.advance(0.1)
    assert lease_unit(store, "one").is_probe is (deaths > 0)


@pytest.mark.parametrize(
    ("identity", "is_left"),
    [
        (OTHER, False),
        (IDENTITY.model_copy(update={"model": "./latest"}), True),
    ],
    ids=["another checkpoint under one name", "one model under two names"],
)
def test_a_worker_rests_from_what_was_loaded_whatever_it_is_called(
    store: Store, clock: Clock, identity: Identity, is_left: bool
) -> None:
    start_units(store)
    fall_sick(store, clock, "one")
    start_units(store, number=2, identity=identity)
    assert (store.read(jobs.job, job_id(2)).waits is not None) is is_left
    lease = units.lease(store, "one", TTL_S)
    assert (lease is None) is is_left
    assert store.read(jobs.counts, "one")[JobState.RUNNING] == (0 if is_left else 1)
    if lease is not None:
        assert (lease.job_id, lease.is_probe) == (job_id(2), False)


def test_deaths_are_told_until_no_job_of_the_model_is_left_and_no_rest(store: Store, clock: Clock) -> None:
    start_units(store)
    fall_sick(store, clock, "one")
    clock.advance(REST_S)
    store.write(workers.beat, "one", TTL_S)
    store.write(jobs.cancel, job_id(1))
    assert store.read(workers.sick) == []
    start_units(store, number=2)
    assert [one.deaths for one in store.read(workers.sick)] == [3]


def test_a_resume_ends_the_rests_from_its_model_with_one_probe(store: Store, clock: Clock) -> None:
    """1. The only worker rests, and the job is blocked. 2. It is resumed: a probe at once. 3. That fails.

    Another one that found before the resume that nobody takes it does not block it any more.
    """
    start_units(store)
    start_units(store, number=2, identity=OTHER)
    fall_sick(store, clock, "one", 2)
    (sickness,) = fall_sick(store, clock, "one")
    store.write(workers.block, sickness)
    assert store.read(jobs.state, job_id(1)) is JobState.BLOCKED
    store.write(jobs.resume, job_id(1))
    store.write(workers.block, sickness)
    assert store.read(jobs.job, job_id(1)).waits is None
    lease = lease_unit(store, "one")
    assert (lease.job_id, lease.is_probe) == (job_id(1), True)
    assert [sickness.job_id for sickness in die(store, lease)] == [job_id(1)]
    assert units.lease(store, "one", TTL_S) is None


@pytest.mark.parametrize("at_once", [False, True])
def test_when_the_last_of_two_workers_falls_sick_the_jobs_of_both_are_blocked(
    store: Store, clock: Clock, at_once: bool
) -> None:
    for number in (1, 2):
        start_units(store, number=number)
    store.write(workers.beat, "two", 10 * REST_S)
    assert fall_sick(store, clock, "one", 1, deaths=2) == []
    assert fall_sick(store, clock, "two", 2, deaths=2) == []
    clock.advance(LONGER_S)
    for owner in ("one", "two"):
        store.write(workers.beat, owner, TTL_S)
    leases = [lease_unit(store, owner, job_id(n)) for n, owner in enumerate(("one", "two"), 1)]
    last: Callable[[], list[Sickness]] = lambda: die(store, leases[1])  # noqa: E731
    with ThreadPoolExecutor(1) as pool:
        with store.writing() as tx:
            how = {"alone": False, "sound": False}
            workers.engine_died(tx, leases[0], EngineDied("why"), REST_S, **how)
            assert workers.untaken(tx, leases[0].identity.model_sha256()) == []
            dying = pool.submit(last) if at_once else None
        untaken = dying.result(60) if dying is not None else last()
    for sickness in untaken:
        store.write(workers.block, sickness)
    for number in (1, 2):
        job = store.read(jobs.job, job_id(number))
        assert job.state is JobState.BLOCKED and job.problem is not None
        assert "no other worker takes the model: why" in job.problem.detail


def test_a_job_that_a_healthy_worker_takes_is_not_blocked_with_one_that_it_does_not_see(
    store: Store, clock: Clock
) -> None:
    """1. Away from the data folder one worker rests, and one is well. 2. The only one at home rests, too."""
    start_units(store, 3, repo_id="org/name")
    start_units(store, 3, number=2)
    store.write(workers.beat, "healthy", 10 * REST_S, host=2)
    untaken: list[Sickness] = []
    for owner, number, host in (("away", 1, 1), ("home", 2, HOME)):
        for _ in range(3):
            clock.advance(LONGER_S)
            store.write(workers.beat, owner, TTL_S, host=host)
            lease = units.lease(store, owner, TTL_S, prefer_job=job_id(number), host=host)
            assert lease is not None
            untaken += die(store, lease)
    assert [(one.owner, one.job_id) for one in untaken] == [("home", job_id(2))]


def test_a_worker_that_cannot_go_on_with_a_job_counts_as_none_for_it(store: Store, clock: Clock) -> None:
    """1. A job is begun with one engine. 2. That of its worker dies; the other worker has another one.

    That one's dies, too, on another model.
    """
    start_units(store, 4)
    start_units(store, number=2, identity=OTHER)
    commit(store, lease_unit(store, "one"))
    store.write(workers.beat, "two", 10 * REST_S, status=WorkerStatus(engine="vllm 0.33.0"))
    die(store, replace(lease_unit(store, "two", job_id(2)), ttl_s=10 * REST_S))
    assert [one.job_id for one in fall_sick(store, clock, "one")] == [job_id(1)]


@pytest.mark.parametrize(
    ("error", "state"), [(EngineRefused("why"), JobState.FAILED), (EngineChanged("why"), JobState.BLOCKED)]
)
def test_a_job_is_left_to_other_workers_until_none_takes_it(
    store: Store, clock: Clock, error: QuarryError, state: JobState
) -> None:
    """1. One of two workers passes a job on, twice. 2. The other is killed. 3. The first one looks again."""
    start_units(store, 2)
    start_units(store, 1, number=2)
    for rest_s in (TTL_S, REST_S):
        for owner in ("one", "two"):
            store.write(workers.beat, owner, TTL_S)
        store.write(workers.pass_on, lease_unit(store, "one", job_id(1)), error, REST_S)
        store.write(workers.beat, "one", 2 * REST_S)
        waits = store.read(jobs.job, job_id(1)).waits
        assert waits is not None and waits.endswith(": why")
        assert sum(store.read(jobs.counts, "one").values()) == 1
        other = lease_unit(store, "one", job_id(1))
        assert other.job_id == job_id(2), "of the same model"
        store.write(tasks.release, other)
        clock.advance(rest_s)
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
    store.write(workers.pass_on, lease_unit(store, "one", job_id(1)), error, REST_S)
    assert store.read(jobs.state, job_id(1)) is state
    store.write(jobs.resume, job_id(1))
    assert lease_unit(store, "one", job_id(1)).job_id == job_id(1)


@pytest.mark.parametrize("events", ["a", "a a", "a b resume a", "a -a a"])
def test_a_worker_that_refuses_a_job_looks_again_once_another_one_that_was_killed_is_gone(
    store: Store, clock: Clock, events: str
) -> None:
    """Of several units at once, after a resume, and under another name; then it fails the job."""
    start_units(store, 4)
    for owner in ("a", "b"):
        store.write(workers.beat, owner, TTL_S)
    held = {owner: [lease_unit(store, owner) for _ in range(events.count(owner))] for owner in ("a", "b")}
    for event in events.split():
        if event == "resume":
            assert store.read(jobs.state, job_id(1)) is JobState.FAILED
            store.write(jobs.resume, job_id(1))
            held["a"] = [lease_unit(store, "a")]
        elif event == "-a":
            store.write(workers.leave, "a")
        else:
            store.write(workers.pass_on, held[event].pop(), EngineRefused("why"), REST_S)
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
    assert units.lease(store, "a", TTL_S) is None
    store.write(workers.beat, "a", 2 * TTL_S)
    clock.advance(TTL_S)
    store.write(workers.pass_on, lease_unit(store, "a"), EngineRefused("why"), REST_S)
    assert store.read(jobs.state, job_id(1)) is JobState.FAILED


@pytest.mark.parametrize("away_s", [0.8 * TTL_S, 2 * TTL_S])
def test_the_first_worker_back_after_the_database_was_away_is_not_the_only_one(
    store: Store, clock: Clock, away_s: float
) -> None:
    """1. Two are there. 2. The database is away. 3. One refuses a job. 4. The other does not come back."""
    start_units(store)
    for owner in ("two", "one"):
        clock.advance(TTL_S / 4)
        store.write(workers.beat, owner, TTL_S)
    lease = lease_unit(store, "one")
    clock.advance(away_s)
    store.write(workers.pass_on, lease, EngineRefused("why"), REST_S)
    assert store.read(jobs.state, job_id(1)) is JobState.RUNNING
    store.write(workers.beat, "one", 2 * TTL_S)
    clock.advance(TTL_S)
    store.write(workers.pass_on, lease_unit(store, "one"), EngineRefused("why"), REST_S)
    assert store.read(jobs.state, job_id(1)) is JobState.FAILED


@pytest.mark.parametrize("numbers", [(1, 1), (1, 2)], ids=["one job", "two jobs"])
def test_two_workers_that_refuse_jobs_at_once_do_not_leave_them_to_each_other(
    store: Store, numbers: tuple[int, int]
) -> None:
    for number in (1, 2):
        start_units(store, number=number)
    owners, refused = ("one", "two"), EngineRefused("why")
    for owner in owners:
        store.write(workers.beat, owner, TTL_S)
    leases = [lease_unit(store, owner, job_id(n)) for owner, n in zip(owners, numbers, strict=True)]
    with ThreadPoolExecutor(1) as pool:
        with store.writing() as tx:
            workers.pass_on(tx, leases[0], refused, REST_S)
            other = pool.submit(store.write, workers.pass_on, leases[1], refused, REST_S)
        other.result(60)
    for owner, number in zip(reversed(owners), numbers, strict=True):
        if store.read(jobs.state, job_id(number)) is not JobState.FAILED:
            store.write(workers.pass_on, lease_unit(store, owner, job_id(number)), refused, REST_S)
        assert store.read(jobs.state, job_id(number)) is JobState.FAILED


def test_a_worker_that_ends_says_whether_it_rested(store: Store, clock: Clock) -> None:
    start_units(store)
    fall_sick(store, clock, "one")
    fall_sick(store, clock, "two", deaths=1)
    assert [store.write(workers.leave, owner) for owner in ("two", "one")] == [False, True]
    assert store.read(workers.sick) == []


def test_a_sick_worker_takes_a_unit_that_an_engine_died_on_alone_after_all_others(
    store: Store, clock: Clock
) -> None:
    start_units(store, 3)
    fall_sick(store, clock, "one", deaths=1)
    clock.advance(SHORT_S)
    probe = lease_unit(store, "one")
    assert (probe.item, probe.is_probe) == (0, True)
    die(store, probe, alone=True)
    clock.advance(LONGER_S)
    assert [lease_unit(store, "one").item for _ in range(3)] == [1, 2, 0]


@pytest.mark.parametrize(
    ("workers_of_deaths", "only", "at_fault"),
    [
        ("", True, False),
        ("a", True, False),
        ("aa", True, True),
        ("aa", False, False),  # another worker is to try it
        ("ab", False, True),
        ("ab", True, True),
    ],
)
def test_a_unit_is_at_fault_if_two_workers_or_the_only_one_died_on_it_alone_after_other_units(
    workers_of_deaths: str, only: bool, at_fault: bool
) -> None:
    assert is_at_fault(tuple(workers_of_deaths), is_only_worker=only) is at_fault


def test_a_wait_that_ends_while_a_unit_is_looked_for_still_begins_with_another_unit(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. An engine dies on a lone unit. 2. Its worker waits, finds none, and its wait ends at that moment."""
    start_units(store, 3)
    die(store, lease_unit(store, "one"))
    clock.advance(SHORT_S)
    die(store, lease_unit(store, "one"), alone=True)
    lease, looked = tasks.lease, 0

    def waiting(*given: Any, **more: Any) -> Any:
        nonlocal looked
        found = lease(*given, **more)
        if not looked:
            clock.advance(LONGER_S)
        looked += 1
        return found

    monkeypatch.setattr(tasks, "lease", waiting)
    taken = lease_unit(store, "one")
    assert (taken.item, looked) == (1, 3)
    assert [row.state for row in store.read(units.of_job, job_id(1))] == ["pending", "leased", "pending"]


@pytest.mark.parametrize(
    ("events", "is_failed"),
    [
        ("a0 a1 a2", False),  # another worker is to try it
        ("a0 b0", True),
        ("a0 b1", True),  # where the model is at fault, all units are
        ("a0 B0 b1", False),  # of the model, a worker got the same unit right
        ("a0 a1 a2 B0 B1 B2 b3", False),
        ("a0 A1 a0", False),
        ("a0 -b a0", True),  # the only worker
        ("-b a0 A1 a0", True),
        ("a0 -a b1", False),  # the same node may go on under another name
        ("a0 -a b1 b1", True),
        ("a0 resume -b a0", False),
        ("a0 next -b a0", False),
        ("a0 next -b a0 a1", True),
        ("d0 b0", False),  # an engine that died says nothing of states
        ("a0 d0 b1", True),
    ],
)
def test_states_are_the_models_fault_by_the_word_of_two_workers_or_of_the_only_one_twice(
    store: Store, clock: Clock, events: str, is_failed: bool
) -> None:
    """A small letter is a worker whose engine gets a unit wrong, a large one right; `d`: that of a dies."""
    start_units(store, 5)
    there, number = {"a", "b"}, 1
    for event in events.split():
        who, unit = event[0].replace("d", "a").lower(), event[-1]
        assert store.read(jobs.state, job_id(number)) is not JobState.FAILED
        if event == "resume":
            store.write(jobs.pause, job_id(1))
            store.write(jobs.resume, job_id(1))
        elif event == "next":
            store.write(jobs.cancel, job_id(1))
            start_units(store, 5, number := 2)
        elif event[0] == "-":
            there.remove(unit)
            store.write(workers.leave, unit)
        else:
            clock.advance(REST_S)
            for owner in there:
                store.write(workers.beat, owner, TTL_S)
            held = [lease_unit(store, who)]
            while str(held[-1].item) != unit:
                held.append(lease_unit(store, who))
            for other in held[:-1]:
                store.write(tasks.release, other)
            if event[0].isupper():
                commit(store, held[-1])
            elif event[0] == "d":
                die(store, held[-1], alone=True, sound=True)
            else:
                die(store, held[-1], StatesWrong("why"))
    assert (store.read(jobs.state, job_id(number)) is JobState.FAILED) is is_failed
