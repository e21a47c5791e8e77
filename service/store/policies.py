"""What is particular to each kind of task; everything else is the same for all of them."""

import sys
from dataclasses import dataclass

from schemas.job import JobState
from service.errors import Outcome
from service.store.values import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a kind's tasks are leased and named, and what becomes of a job whose task cannot be ended.

    `of_units`: a task is a unit of its job, counted there and reported by an event at every move.
    `told_by_job`: the job itself says why the task is tried again, and not an event of each attempt.
    `by_turns`: of jobs of one priority, those whose owner has none leased come first.
    `one_an_owner`: of one owner's jobs, one task at a time is leased.
    `of_hosts`: its item is the host that alone may work on it.
    `ahead`: it is done ahead of time, so that no error but one that fails the job ends it.
    `few`: jobs of any number have few open tasks of it, from which they are found.
    `one_a_subject`: tasks of different jobs may have the same subject, which one lease at a time may work on.
    `exhausted` is the job's state after the last attempt that may fail, VOID if none ever ends it;
    `max_deaths` is how many owners may vanish over the task, killed or crashed, before the job is blocked.
    `delay` is waited for after the first failed attempt, as a share of the lease's time, and doubles with
    each, up to that time.
    """

    job_states: frozenset[JobState]
    of_units: bool = False
    told_by_job: bool = False
    by_turns: bool = False
    one_an_owner: bool = False
    of_hosts: bool = False
    ahead: bool = False
    few: bool = False
    one_a_subject: bool = False
    exhausted: Outcome
    max_deaths: int = sys.maxsize
    delay: float
    blame: str = ""
    cure: str = ""


POLICIES = {
    TaskKind.PLAN: Policy(
        job_states=frozenset({JobState.QUEUED, JobState.RUNNING}),
        by_turns=True,
        exhausted=Outcome.BLOCK,
        max_deaths=3,
        delay=1 / 12,
        blame="planners died without a word over this job",
        cure="look for the reason in the planner's log and the kernel's (memory), then resume",
    ),
    # More deaths than attempts: a node that restarts is no fault of the unit that it happened to hold.
    TaskKind.CAPTURE: Policy(
        job_states=frozenset({JobState.QUEUED, JobState.RUNNING}),
        of_units=True,
        exhausted=Outcome.FAIL,
        max_deaths=10,
        delay=0.0,
        blame="workers died without a word while they held unit {item}; a worker holds several units at once,"
        " so another of them may be at fault",
        cure="look in the kernel's log for workers that were killed for want of memory; give them more of "
        "it, or submit a new job with a smaller storage.shard_bytes; `resume` tries again",
    ),
    # Nothing waits for it: what is not stored by the time all is captured goes with the publication.
    TaskKind.STORE: Policy(
        job_states=frozenset({JobState.QUEUED, JobState.RUNNING}),
        of_hosts=True,
        ahead=True,
        told_by_job=True,
        exhausted=Outcome.BLOCK,
        delay=1.0,
    ),
    TaskKind.PUBLISH: Policy(
        job_states=frozenset({JobState.QUEUED, JobState.RUNNING, JobState.PUBLISHING}),
        told_by_job=True,
        one_a_subject=True,
        exhausted=Outcome.BLOCK,
        max_deaths=20,
        delay=0.5,
        blame="publishers died without a word over this job",
        cure="look for the reason in the worker's log and the kernel's (memory), then resume",
    ),
    # How an attempt ends is recorded by `webhooks`; only a bug ends one otherwise.
    TaskKind.WEBHOOK: Policy(
        job_states=frozenset(JobState) - {JobState.QUEUED, JobState.DELETING},
        one_an_owner=True,
        few=True,
        exhausted=Outcome.VOID,
        delay=1.0,
    ),
    # It is tried again for as long as the job is there.
    TaskKind.DELETE: Policy(
        job_states=frozenset({JobState.DELETING}),
        told_by_job=True,
        exhausted=Outcome.VOID,
        delay=1.0,
    ),
}


def task_name(kind: TaskKind, item: int) -> str:
    """Return how a job's task is called: `unit 3`, or its kind."""
    return f"unit {item}" if POLICIES[kind].of_units else kind.value
