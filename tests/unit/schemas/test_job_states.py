"""The tables of legal moves: complete, and without a state that a job or a unit could be lost in."""

from collections.abc import Mapping
from enum import StrEnum

import pytest

from schemas.job import ENDED_JOB_STATES, JOB_MOVES, JobState
from service.store.values import TASK_MOVES, TaskState


def reachable(moves: Mapping[StrEnum, frozenset[StrEnum]], origin: StrEnum) -> set[StrEnum]:
    """Return every state that some row of legal moves leads to from `origin`."""
    seen, waiting = {origin}, [origin]
    while waiting:
        new = moves[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


@pytest.mark.parametrize(("moves", "states"), [(JOB_MOVES, JobState), (TASK_MOVES, TaskState)])
def test_every_state_has_its_row_of_moves(moves, states) -> None:
    assert set(moves) == set(states)
    assert set().union(*moves.values()) <= set(states)


@pytest.mark.parametrize(("moves", "first"), [(JOB_MOVES, JobState.QUEUED), (TASK_MOVES, TaskState.PENDING)])
def test_every_state_can_be_reached_from_the_first(moves, first) -> None:
    assert reachable(moves, first) == set(moves)


@pytest.mark.parametrize(("moves", "last"), [(JOB_MOVES, JobState.DELETING), (TASK_MOVES, TaskState.DONE)])
def test_the_last_state_can_be_reached_from_every_state_and_left_by_none(moves, last) -> None:
    assert all(last in reachable(moves, state) for state in moves)
    assert moves[last] == frozenset()
    assert [state for state in moves if not moves[state]] == [last]


def test_only_a_lease_may_follow_itself_as_the_next_epoch() -> None:
    assert not [state for state, targets in JOB_MOVES.items() if state in targets]
    assert [state for state, targets in TASK_MOVES.items() if state in targets] == [TaskState.LEASED]


def test_an_ended_job_is_left_only_by_resuming_or_deleting_it() -> None:
    assert {state: JOB_MOVES[state] for state in ENDED_JOB_STATES} == {
        JobState.COMPLETED: frozenset({JobState.DELETING}),
        JobState.FAILED: frozenset({JobState.QUEUED, JobState.DELETING}),
        JobState.CANCELLED: frozenset({JobState.QUEUED, JobState.DELETING}),
        JobState.DELETING: frozenset(),
    }


def test_a_job_that_is_not_being_deleted_can_be_completed() -> None:
    left = set(JobState) - {JobState.DELETING}
    assert all(JobState.COMPLETED in reachable(JOB_MOVES, state) for state in left)
