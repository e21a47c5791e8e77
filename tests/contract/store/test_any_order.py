"""Verbs in any order, right and wrong: counters are always the sums of the rows, and every move is legal."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from service.errors import Conflict, LeaseLost, Outcome
from service.store import (
    PlanLease,
    PublishLease,
    Store,
    UnitLease,
    jobs,
    migration,
    plans,
    publishing,
    tasks,
    units,
)
from tests.support.pg import Postgres
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    check_sums,
    commit,
    job_id,
    planned,
    reject,
    submit,
)

JOB = job_id(1)


class Walk:
    """One job and everybody who ever worked on it: old leases are kept and used again, as zombies would."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store, self.clock = store, clock
        self.plans: list[PlanLease] = []
        self.units: list[UnitLease] = []
        self.publishers: list[PublishLease] = []
        submit(store)

    def lease_plan(self, pick: int) -> None:
        if lease := plans.lease(self.store, OWNER, TTL_S):
            self.plans.append(lease)
            self.store.write(plans.set_identity, lease, IDENTITY)

    def add_unit(self, pick: int) -> None:
        if self.plans:
            self.store.write(
                plans.add_unit, self.plans[-1 - pick % len(self.plans)], planned(pick), (reject(100 + pick),)
            )

    def finish_plan(self, pick: int) -> None:
        if self.plans and self.store.read(units.of_job, JOB):
            self.store.write(plans.finish, self.plans[-1 - pick % len(self.plans)], (reject(200),))

    def lease_unit(self, pick: int) -> None:
        if lease := units.lease(self.store, OWNER, TTL_S):
            assert lease.attempt_id not in [other.attempt_id for other in self.units]
            self.units.append(lease)

    def commit_unit(self, pick: int) -> None:
        if self.units:
            lease = self.units[-1 - pick % len(self.units)]
            commit(self.store, lease, (reject(lease.attempt_id.unit),))

    def release_unit(self, pick: int) -> None:
        if self.units:
            self.store.write(tasks.release, self.units[-1 - pick % len(self.units)])

    def fail_unit(self, pick: int) -> None:
        if self.units:
            self.store.write(
                tasks.fail, self.units[-1 - pick % len(self.units)], PROBLEM, list(Outcome)[pick], 2
            )

    def fail_plan(self, pick: int) -> None:
        if self.plans:
            lease = self.plans[-1 - pick % len(self.plans)]
            self.store.write(tasks.fail, lease, PROBLEM, list(Outcome)[pick], 2)

    def release_owner(self, pick: int) -> None:
        self.store.write(tasks.release_owner, OWNER)

    def publish(self, pick: int) -> None:
        if lease := publishing.lease(self.store, OWNER, TTL_S):
            self.publishers.append(lease)

    def complete(self, pick: int) -> None:
        if self.publishers:
            self.store.write(publishing.complete, self.publishers[-1 - pick % len(self.publishers)], None)

    def cancel(self, pick: int) -> None:
        self.store.write(jobs.cancel, JOB)

    def resume(self, pick: int) -> None:
        self.store.write(jobs.resume, JOB)

    def wait(self, pick: int) -> None:
        self.clock.advance(TTL_S * pick / 2)


AHEAD = [
    Walk.lease_plan, Walk.add_unit, Walk.lease_unit, Walk.commit_unit,
    Walk.finish_plan, Walk.publish, Walk.complete,
]  # fmt: skip
ASIDE = [
    Walk.release_unit, Walk.fail_unit, Walk.fail_plan, Walk.release_owner,
    Walk.cancel, Walk.resume, Walk.wait,
]  # fmt: skip
VERBS: list[Callable[[Walk, int], None]] = [*AHEAD, *AHEAD, *AHEAD, *ASIDE]
"""Mostly what brings a job on, so that many walks come far."""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@given(steps=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 3)), min_size=30, max_size=60))
@settings(max_examples=10)
def test_counters_rows_and_events_agree_after_any_verbs(
    steps, kind: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    with ExitStack() as ends:
        if kind == "sqlite":
            folder: Path = tmp_path_factory.mktemp("walk")
            url = f"sqlite:///{folder / 'quarry.db'}"
        else:
            server: Postgres = request.getfixturevalue("postgres")
            url = ends.enter_context(server.database())
        clock = Clock()
        store = Store(url, clock.of(url))
        ends.callback(store.close)
        store.write(migration.migrate)
        walk = Walk(store, clock)
        for verb, pick in steps:
            with suppress(Conflict, LeaseLost):
                verb(walk, pick)
            check_sums(store, JOB)
