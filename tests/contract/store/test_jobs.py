"""Jobs: accepted once, read, listed, moved only where the table allows it."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from schemas.job import JOB_MOVES, JobState, Progress
from schemas.keys import NewKey, Scope
from service.errors import (
    IdempotencyConflict,
    IllegalMove,
    NotFound,
    Outcome,
    QuotaExceeded,
    RequestError,
)
from service.store import (
    JobRow,
    NewJob,
    Store,
    TaskState,
    canaries,
    commits,
    deletion,
    jobs,
    keys,
    plans,
    tasks,
    units,
)
from service.store.transitions import lock_job, move_task, tasks_in
from tests.support.finished_job import a_canary
from tests.support.store_cases import (
    IDENTITY,
    OWNER,
    PROBLEM,
    TTL_S,
    Clock,
    a_request,
    capture,
    commit,
    job_id,
    lease_plan,
    lease_unit,
    provenance,
    reach,
    start_units,
    stop_job,
    submit,
)


def test_a_submitted_job_reads_back_as_it_was_given(store: Store, clock: Clock) -> None:
    request = a_request("na\u00efve \x00 text")
    row, created = store.write(jobs.submit, NewJob.of(job_id(1), "key", request))
    assert created
    assert row == store.read(jobs.job, job_id(1))
    assert row.state is JobState.QUEUED
    assert store.read(jobs.request, row.id) == request
    assert row.progress == Progress()
    assert row.created_at.timestamp() == clock.now_s
    assert row.created_at.utcoffset() is not None


def test_the_same_key_and_body_is_the_same_job(store: Store) -> None:
    first, _ = store.write(jobs.submit, NewJob.of(job_id(1), "key", a_request()))
    again, created = store.write(jobs.submit, NewJob.of(job_id(1), "key", a_request()))
    assert not created
    assert again == first
    assert len(store.read(jobs.events, job_id(1))) == 1


def test_the_same_key_with_another_body_is_refused(store: Store) -> None:
    store.write(jobs.submit, NewJob.of(job_id(1), "key", a_request("one")))
    with pytest.raises(IdempotencyConflict) as refused:
        store.write(jobs.submit, NewJob.of(job_id(1), "key", a_request("two")))
    assert refused.value.field == "Idempotency-Key"
    assert refused.value.cure
    assert store.read(jobs.request, job_id(1)) == a_request("one")


def test_a_key_is_one_job_for_each_owner(store: Store) -> None:
    numbers = itertools.count(1)
    made = [NewJob.of(job_id(next(numbers)), "key", a_request(), owner=owner) for owner in (None, "a", "b")]
    for owner in ("a", "b"):
        store.write(keys.add, f"{owner:0>8}", "0" * 64, NewKey(name=owner, scopes=(Scope.JOBS_WRITE,)))
    assert [store.write(jobs.submit, one)[1] for one in made] == [True] * 3
    assert [store.write(jobs.submit, one)[1] for one in made] == [False] * 3


def test_the_key_of_a_deleted_job_is_free_after_thirty_days_and_names_a_new_job(
    store: Store, clock: Clock
) -> None:
    submit(store)
    store.write(jobs.cancel, job_id(1))
    store.write(deletion.begin, job_id(1), with_dataset=True)
    again = NewJob.of(job_id(2), "key-1", a_request())
    for _ in range(2):
        with pytest.raises(IdempotencyConflict, match=job_id(1)):
            store.read(jobs.submitted, again)
        with pytest.raises(IdempotencyConflict, match="was deleted") as caught:
            store.write(jobs.submit, again)
        assert "new key" in caught.value.cure
        store.write(deletion.forget, job_id(1))
    clock.advance(31 * 86_400)
    assert store.read(jobs.submitted, again) is None
    assert store.write(jobs.submit, again)[0].id == job_id(2)


def test_an_unknown_job_is_not_found(store: Store) -> None:
    for verb in (jobs.job, jobs.state, jobs.cancel, jobs.resume):
        with pytest.raises(NotFound):
            store.write(verb, job_id(9))


def test_the_lists_of_an_unknown_job_are_empty(store: Store) -> None:
    lists = (
        units.of_job,
        commits.shards,
        commits.unit_commits,
        commits.rejects,
        jobs.events,
    )
    for verb in lists:
        assert store.read(verb, job_id(9)) == []


@pytest.mark.parametrize("last", [[3], []], ids=["the last page is short", "it is full"])
def test_jobs_are_listed_newest_first_in_pages(store: Store, last: list[int]) -> None:
    for number in (*last, 1, 2, 5, 4):
        submit(store, number)
    seen, cursor = [], None
    while True:
        rows, cursor = store.read(jobs.page, cursor=cursor, limit=2)
        seen.append([row.id for row in rows])
        if cursor is None:
            break
    pages = [[4, 5], [2, 1], last] if last else [[4, 5], [2, 1]]
    assert seen == [[job_id(number) for number in page] for page in pages]


def test_a_page_goes_on_where_a_job_was_deleted(store: Store) -> None:
    for number in (1, 2, 3):
        submit(store, number)
    (last,), cursor = store.read(jobs.page, limit=1)
    store.write(jobs.cancel, last.id)
    store.write(deletion.begin, last.id, with_dataset=False)
    store.write(deletion.forget, last.id)
    assert [row.id for row in store.read(jobs.page, cursor=cursor)[0]] == [job_id(2), job_id(1)]


def test_jobs_are_listed_by_state_and_counted_in_every_state(store: Store) -> None:
    submit(store, 1)
    submit(store, 2)
    store.write(jobs.cancel, job_id(1))
    assert [row.id for row in store.read(jobs.page, state=JobState.CANCELLED)[0]] == [job_id(1)]
    assert [row.id for row in store.read(jobs.page, state=JobState.QUEUED)[0]] == [job_id(2)]
    expected = dict.fromkeys(JobState, 0) | {JobState.QUEUED: 1, JobState.CANCELLED: 1}
    assert store.read(jobs.counts) == expected


def test_a_cursor_of_no_page_is_refused_by_name(store: Store) -> None:
    with pytest.raises(RequestError) as refused:
        store.read(jobs.page, cursor="nonsense")
    assert refused.value.field == "cursor"


def test_a_view_names_the_identity_once_it_is_known(store: Store) -> None:
    assert submit(store).view().identity_sha256 is None
    lease = lease_plan(store)
    store.write(plans.set_identity, lease, IDENTITY)
    view = store.read(jobs.job, job_id(1)).view()
    assert view.identity_sha256 == IDENTITY.sha256()
    assert (view.id, view.state) == (job_id(1), JobState.RUNNING)


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize(
    ("verb", "target"),
    [
        ("cancel", JobState.CANCELLED),
        ("pause", JobState.PAUSED),
        ("resume", JobState.QUEUED),
        ("fail", JobState.FAILED),
        ("block", JobState.BLOCKED),
    ],
)
def test_a_verb_moves_a_job_exactly_where_the_table_allows_it(
    store: Store, state: JobState, verb: str, target: JobState
) -> None:
    before = reach(store, state)
    verbs: dict[str, Callable[[str], JobRow | None]] = {
        "cancel": lambda job: store.write(jobs.cancel, job),
        "pause": lambda job: store.write(jobs.pause, job),
        "resume": lambda job: store.write(jobs.resume, job),
        "fail": lambda job: stop_job(store, job, JobState.FAILED),
        "block": lambda job: stop_job(store, job),
    }
    events = len(store.read(jobs.events, before.id))
    if target in JOB_MOVES[state]:
        verbs[verb](before.id)
        after = store.read(jobs.job, before.id)
        assert after.state is store.read(jobs.state, before.id) is target
        assert after.problem == (PROBLEM if verb in ("fail", "block") else None)
        assert store.read(jobs.events, before.id)[events].state is target
    elif target is state and verb in ("cancel", "pause"):
        assert verbs[verb](before.id) == before
        assert len(store.read(jobs.events, before.id)) == events
    else:
        with pytest.raises(IllegalMove) as refused:
            verbs[verb](before.id)
        assert state in refused.value.detail
        assert refused.value.cure
        assert store.read(jobs.job, before.id) == before


def test_a_resumed_job_goes_on_with_what_it_has(store: Store) -> None:
    """1. One of two units is done. 2. The other fails for good. 3. After resume only that one is left."""
    start_units(store)
    commit(store, lease_unit(store))
    store.write(tasks.fail, lease_unit(store), PROBLEM, Outcome.FAIL, 3)
    assert store.read(jobs.job, job_id(1)).progress.units_failed == 1
    resumed = store.write(jobs.resume, job_id(1))
    assert resumed.state is JobState.QUEUED
    assert resumed.progress.units_failed == 0
    assert resumed.provenance == provenance()
    assert plans.lease(store, OWNER, TTL_S) is None, "its plan is done"
    lease = lease_unit(store)
    assert (lease.attempt_id.unit, lease.attempt_id.epoch, lease.attempts) == (1, 2, 1)


def test_events_are_read_on_from_a_number(store: Store) -> None:
    capture(store)
    events = store.read(jobs.events, job_id(1))
    assert store.read(jobs.events, job_id(1), after=2) == events[2:]
    assert store.read(jobs.events, job_id(1), after=1, limit=2) == events[1:3]
    assert store.read(jobs.events, job_id(1), after=events[-1].id) == []


def test_a_unit_that_is_done_can_never_move_again(store: Store, database: Store) -> None:
    capture(store)
    with pytest.raises(IllegalMove), database.writing() as tx:
        job = lock_job(tx, job_id(1))
        done = tasks_in(tx, job, TaskState.DONE)[0]
        move_task(tx, job, done, replace(done, state=TaskState.PENDING))
    assert [row.state for row in store.read(units.of_job, job_id(1))] == [TaskState.DONE]


def test_a_canary_report_is_kept_and_replaced_unless_the_new_one_is_of_shorter_prompts(store: Store) -> None:
    short, long = (a_canary().model_copy(update={"tokens": tokens}) for tokens in (118, 407))
    assert store.read(canaries.report, "key") is None
    store.write(canaries.record, "key", short)
    store.write(canaries.record, "other", short)
    store.write(canaries.record, "key", long)
    assert store.read(canaries.report, "key") == long
    store.write(canaries.record, "key", short)
    assert store.read(canaries.report, "key") == long
    assert store.read(canaries.report, "other") == short


def test_a_job_that_ended_is_resumed_within_its_owners_quota(store: Store) -> None:
    """Jobs are submitted and cancelled one after another; then all of them are to go on."""
    new = NewKey(name="team", scopes=(Scope.JOBS_WRITE,), max_jobs=2)
    store.write(keys.add, "k1", "0" * 64, new)
    for number in range(4):
        one = NewJob.of(job_id(number), f"key-{number}", a_request(), owner="team")
        store.write(jobs.submit, one)
        store.write(jobs.cancel, one.id)
    for number in range(2):
        store.write(jobs.resume, job_id(number))
    with pytest.raises(QuotaExceeded, match="max_jobs"):
        store.write(jobs.resume, job_id(2))
    assert store.read(jobs.state, job_id(2)) is JobState.CANCELLED
    store.write(jobs.pause, job_id(0))
    assert store.write(jobs.resume, job_id(0)).state is JobState.QUEUED, "one that has not ended is counted"
