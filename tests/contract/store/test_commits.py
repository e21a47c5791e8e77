"""Unit commits: all of an attempt or nothing of it, and exact accounts."""

from dataclasses import replace

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from service.errors import IdentityChanged, StatesWrong
from service.store import Store, TaskState, commits, jobs, plans, units
from service.store.tables import UNIT_PLAN
from tests.support.store_cases import (
    CHECKS,
    IDENTITY,
    account,
    capture,
    commit,
    job_id,
    lease_unit,
    made,
    planned,
    provenance,
    reject,
    shard,
    start_plan,
    start_units,
)


def test_a_commit_makes_the_unit_done_with_all_it_is_made_of(store: Store) -> None:
    start_units(store, units=1)
    lease = lease_unit(store)
    whole = made(lease, rejects=(reject(1, "not-finite"),))
    store.write(commits.commit, whole, lease)
    assert store.read(commits.unit_commits, job_id(1)) == [whole]
    assert store.read(commits.shards, job_id(1)) == list(whole.shards)
    assert store.read(commits.rejects, job_id(1)) == list(whole.rejects)
    assert store.read(units.of_job, job_id(1))[0].state is TaskState.DONE
    assert store.read(jobs.job, job_id(1)).provenance == whole.provenance


def test_the_plan_of_a_unit_goes_with_its_commit_and_no_other_does(store: Store) -> None:
    start_units(store, units=2)
    lease = lease_unit(store)
    store.write(commits.commit, made(lease), lease)
    with store.reading() as tx:
        assert list(tx.connection.scalars(select(UNIT_PLAN.c.unit))) == [1]


def test_progress_counts_what_was_written_and_rejected(store: Store) -> None:
    lease = start_plan(store)
    store.write(plans.add_unit, lease, planned(0, 3), (reject(0),))
    store.write(plans.add_unit, lease, planned(1, 2), ())
    store.write(plans.finish, lease, ())
    commit(store, lease_unit(store), rejects=(reject(2), reject(3)))
    commit(store, lease_unit(store))
    progress = store.read(jobs.job, job_id(1)).progress
    assert (progress.units_done, progress.units_planned) == (2, 2)
    assert (progress.samples_written, progress.samples_rejected, progress.samples_planned) == (3, 3, 6)
    assert (progress.tokens_written, progress.bytes_written) == (15, 3000)


def test_commits_are_read_back_in_unit_order_with_their_own_shards_and_rejects(store: Store) -> None:
    lease = start_plan(store)
    for unit in range(3):
        store.write(plans.add_unit, lease, planned(unit), ())
    store.write(plans.finish, lease, (reject(90),))
    leases = [lease_unit(store) for _ in range(3)]
    done = [made(leases[0], (reject(1),)), made(leases[1]), made(leases[2], (reject(4), reject(5)))]
    for lease, whole in reversed(list(zip(leases, done, strict=True))):
        store.write(commits.commit, whole, lease)
    assert store.read(commits.unit_commits, job_id(1)) == done
    assert [entry.unit for entry in store.read(commits.shards, job_id(1))] == [0, 1]


def test_rejects_of_plan_and_units_are_paged_by_position(store: Store) -> None:
    lease = start_plan(store)
    store.write(plans.add_unit, lease, planned(0), (reject(3),))
    store.write(plans.finish, lease, (reject(9),))
    commit(store, lease_unit(store), (reject(0), reject(5)))
    first = store.read(commits.rejects, job_id(1), limit=3)
    assert [entry.position for entry in first] == [0, 3, 5]
    assert store.read(commits.rejects, job_id(1), after=5) == [reject(9)]


@pytest.mark.parametrize(
    ("changes", "rejects"),
    [({"rows": 1}, ()), ({}, (reject(0),)), ({"unit": 1}, ()), ({"epoch": 2}, ())],
    ids=["lost row", "doubled row", "foreign unit", "foreign epoch"],
)
def test_a_commit_that_does_not_account_for_its_unit_is_refused(store: Store, changes, rejects) -> None:
    start_units(store, units=2)
    lease = lease_unit(store)
    before = account(store)
    whole = made(lease)
    spoilt = replace(whole, shards=(whole.shards[0].model_copy(update=changes),), rejects=rejects)
    with pytest.raises(StatesWrong):
        store.write(commits.commit, spoilt, lease)
    assert account(store) == before
    commit(store, lease)


def test_a_commit_for_another_identity_is_refused(store: Store) -> None:
    start_units(store, units=1)
    lease = lease_unit(store)
    other = provenance(identity=IDENTITY.model_copy(update={"revision": "decade"}))
    with pytest.raises(IdentityChanged):
        store.write(commits.commit, replace(made(lease), provenance=other), lease)
    assert store.read(jobs.job, job_id(1)).provenance is None


def test_a_commit_by_another_engine_than_the_first_is_refused(store: Store) -> None:
    start_units(store, units=2)
    commit(store, lease_unit(store))
    lease = lease_unit(store)
    with pytest.raises(IdentityChanged) as refused:
        store.write(
            commits.commit, replace(made(lease), provenance=provenance(engine_version="0.33.0")), lease
        )
    assert "vllm 0.32.0" in refused.value.detail
    assert "0.33.0" in refused.value.detail
    assert store.read(jobs.job, job_id(1)).provenance == provenance()


def test_the_final_norm_is_the_first_commits_and_a_unit_of_another_is_refused(store: Store) -> None:
    start_units(store, units=2)
    first = lease_unit(store)
    store.write(commits.commit, replace(made(first), final_norm=b"one"), first)
    lease = lease_unit(store)
    before = account(store)
    with pytest.raises(IdentityChanged, match="final norm is not that of the first unit"):
        store.write(commits.commit, replace(made(lease), final_norm=b"another"), lease)
    assert (account(store), store.read(commits.final_norm, job_id(1))) == (before, b"one")


def test_a_unit_keeps_its_own_provenance(store: Store) -> None:
    """A job may be resumed by a newer service; the job says who made its first unit."""
    start_units(store, units=2)
    commit(store, lease_unit(store))
    newer = provenance().model_copy(update={"service_version": "9.9.9"})
    lease = lease_unit(store)
    store.write(commits.commit, replace(made(lease), provenance=newer), lease)
    assert [commit.provenance for commit in store.read(commits.unit_commits, job_id(1))] == [
        provenance(),
        newer,
    ]
    assert store.read(jobs.job, job_id(1)).provenance == provenance()


def test_shards_of_several_ranks_make_one_unit(store: Store) -> None:
    start_units(store, units=1)
    lease = lease_unit(store)
    halves = tuple(shard(lease, 1).model_copy(update={"path": f"data/r{rank}.parquet"}) for rank in (1, 0))
    store.write(commits.commit, replace(made(lease), shards=halves), lease)
    assert [entry.path for entry in store.read(commits.shards, job_id(1))] == [
        "data/r0.parquet",
        "data/r1.parquet",
    ]
    assert store.read(jobs.job, job_id(1)).progress.samples_written == 2


def test_an_error_that_is_not_a_number_is_kept(store: Store) -> None:
    start_units(store, units=1)
    checks = CHECKS.model_copy(update={"logit_max_error": float("inf")})
    lease = lease_unit(store)
    store.write(commits.commit, replace(made(lease), checks=checks), lease)
    assert store.read(commits.unit_commits, job_id(1))[0].checks == checks


def test_a_commit_that_breaks_in_the_database_leaves_nothing(store: Store) -> None:
    """The shard and the first reject are written before the second is found to be there already."""
    lease = start_plan(store)
    store.write(plans.add_unit, lease, planned(0), (reject(9),))
    store.write(plans.finish, lease, ())
    unit = lease_unit(store)
    before = account(store)
    with pytest.raises(IntegrityError):
        commit(store, unit, (reject(0), reject(9)))
    assert account(store) == before
    commit(store, unit)


def test_units_of_other_jobs_stay_apart(store: Store) -> None:
    capture(store, units=1, number=1)
    capture(store, units=2, number=2)
    assert [entry.path for entry in store.read(commits.shards, job_id(1))] == [
        f"data/{job_id(1)}/train-00000.parquet"
    ]
    assert len(store.read(commits.shards, job_id(2))) == len(store.read(commits.unit_commits, job_id(2))) == 2


def test_a_follower_sees_each_unit_once_while_units_are_committed_out_of_order(store: Store) -> None:
    start_units(store, units=5)
    leases = [lease_unit(store) for _ in range(5)]
    seen: list[int] = []
    last = -1
    for number in (3, 0, 4, 2, 1):
        commit(store, leases[number])
        page = store.read(commits.readable, job_id(1), after=last, limit=10)
        last = page.next_after
        seen += [unit.unit for unit in page.units]
    assert seen == [3, 0, 4, 2, 1]
    first = store.read(commits.readable, job_id(1), after=-1, limit=2)
    two = store.read(commits.readable, job_id(1), after=first.next_after, limit=2)
    assert [unit.unit for unit in (*first.units, *two.units)] == [3, 0, 4, 2]
    none = store.read(commits.readable, job_id(1), after=last, limit=2)
    assert (none.units, none.next_after) == ((), last)
