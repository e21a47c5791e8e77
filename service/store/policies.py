"""The policy of each kind of task; everything else is the same for all kinds."""

import sys
from dataclasses import dataclass

from schemas.job import JobState
from service.errors import Outcome
from service.store.values import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a kind's tasks are leased and named, and what happens to a job whose task keeps failing.

    `of_units`: a task is a unit of its job; the job counts it and has an event for each of its moves.
    `told_by_job`: the job's problem says why the task is retried, instead of one event per attempt.
    `by_turns`: among jobs of equal priority, those whose owner has no lease of this kind come first.
    `one_an_owner`: at most one task of an owner's jobs is leased at a time. `of_hosts`: the task's item is
    the only host that may work on it. `ahead`: while units are captured, the task is done ahead of time, so
    only an error that fails the job stops it. `few`: open tasks of this kind are few even if jobs are many,
    so jobs are found from the tasks. `one_a_subject`: tasks of different jobs may share a subject, on which
    one lease at a time may work. `exhausted` is the outcome after the last allowed failed attempt; with VOID,
    retries never end; `max_deaths` is how many owners may be killed or crash while holding the task before
    the job is blocked; one that `rests` waits after `ALONE_AFTER` of them, ever longer, since a unit on the
    same machine may have killed its owners: each is then tried without the other. `delay` is the wait after
    the first failed attempt, as a fraction of the lease's duration; it doubles with each further one, up to
    that duration. `spares_hub`: attempts that could not reach the Hub are counted apart from other failures.
    """

    job_states: frozenset[JobState]
    of_units: bool = False
    told_by_job: bool = False
    by_turns: bool = False
    one_an_owner: bool = False
    of_hosts: bool = False
    ahead: bool = False
    few: bool = False
    spares_hub: bool = False
    one_a_subject: bool = False
    exhausted: Outcome
    max_deaths: int = sys.maxsize
    rests: bool = False
    delay: float
    blame: str = ""
    cure: str = ""


HUB_DELAYS = 0.5, 15.0
"""As `delay`, and its bound, where a task that `spares_hub` met none: a push asks for 15 minutes itself."""

POLICIES = {
    TaskKind.PLAN: Policy(
        job_states=frozenset({JobState.QUEUED, JobState.RUNNING}),
        by_turns=True,
        spares_hub=True,
        exhausted=Outcome.BLOCK,
        max_deaths=10,
        rests=True,
        delay=1 / 12,
        blame="planners died without a word over this job",
        cure="look for the reason in the planner's log and the kernel's (memory), then resume",
    ),
    # More deaths than attempts: a unit is not to blame if the node that happens to hold it restarts.
    TaskKind.CAPTURE: Policy(
        job_states=frozenset({JobState.QUEUED, JobState.RUNNING}),
        of_units=True,
        spares_hub=True,
        exhausted=Outcome.FAIL,
        max_deaths=10,
        delay=0.0,
        blame="workers died without a word while they held unit {item}, the last of them no other unit",
        cure="look in the kernel's log for workers that were killed for want of memory; give them more of "
        "it, or submit a new job with a smaller storage.shard_bytes; `resume` tries again",
    ),
    # At home nothing waits for it: units that are not stored once all is captured are pushed by publishing.
    # Elsewhere publishing waits for it from then on.
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
    # `webhooks` records how an attempt ends; it ends in another way only through a bug.
    TaskKind.WEBHOOK: Policy(
        job_states=frozenset(JobState) - {JobState.QUEUED, JobState.DELETING},
        one_an_owner=True,
        few=True,
        exhausted=Outcome.VOID,
        delay=1.0,
    ),
    # Retried for as long as the job exists.
    TaskKind.DELETE: Policy(
        job_states=frozenset({JobState.DELETING}),
        told_by_job=True,
        exhausted=Outcome.VOID,
        delay=1.0,
    ),
}


def task_name(kind: TaskKind, item: int) -> str:
    """Return the name of a job's task: `unit 3`, or its kind."""
    return f"unit {item}" if POLICIES[kind].of_units else kind.value
