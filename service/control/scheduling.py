"""Adds schedules after checking their requests, and makes the jobs of slots that are due."""

import logging
from contextlib import AbstractContextManager

from schemas.schedule import NewSchedule, RunView, ScheduleChange, ScheduleRules, ScheduleView
from schemas.source import PostedSource
from service.control.request_body import CheckedSamples, parse_body
from service.control.submit import ALONE, check, check_room
from service.errors import STORE_AWAY, Conflict, DiskFull, QuarryError, internal_error
from service.plan import posted
from service.settings import Settings
from service.store import Store, keys, schedules, spools
from service.store.schedule_rows import Which
from service.work.runner import LoopContext

logger = logging.getLogger(__name__)


def add(
    store: Store,
    settings: Settings,
    schedule: NewSchedule,
    owner: str | None = None,
    turn: AbstractContextManager[None] = ALONE,
) -> ScheduleView:
    """Add a schedule if its request could be submitted now; the request is checked within `turn`.

    Raises what `schedules.add` raises, and what `submit` raises.
    """
    check_room(settings)
    check(schedule.request, settings, turn, of_schedule=True)
    return store.write(schedules.add, schedule, owner)


def preview(
    store: Store,
    settings: Settings,
    schedule: NewSchedule,
    owner: str | None,
    turn: AbstractContextManager[None],
) -> ScheduleView:
    """Return the schedule as it would be added, without adding it. Raises as `add` does."""
    check(schedule.request, settings, turn, of_schedule=True)
    with store.writing() as tx:
        view = schedules.add(tx, schedule, owner)
        tx.connection.rollback()
    return view


def change(
    store: Store,
    settings: Settings,
    which: Which,
    changed: ScheduleChange,
    turn: AbstractContextManager[None] = ALONE,
) -> ScheduleView:
    """Change the given rules of a schedule, or its request, which is checked in its `turn`; or pause it.

    The request may name only what the schedule's owner may use, too, as its jobs do.

    Raises NotFound, Conflict, and what `submit` raises for a request.
    """
    given = changed.model_dump(exclude_unset=True, exclude={"paused", "request"})
    if changed.request is not None:
        _, owner = store.read(schedules.numbered, which)
        allowed = settings.narrowed(store.read(keys.granted, owner))
        check(changed.request, allowed, turn, of_schedule=True)

    def with_given(rules: ScheduleRules) -> ScheduleRules:
        return parse_body(ScheduleRules, rules.model_dump() | given)

    refusal = _no_room(settings)
    return store.write(schedules.change, which, with_given, changed.paused, changed.request, refusal)


def post_samples(store: Store, settings: Settings, schedule: int, samples: CheckedSamples) -> None:
    """Store samples durably for a schedule's next job; posting the same samples again gives the same file.

    Raises NotFound, Conflict if its jobs read another source, QuotaExceeded, DiskFull, WriteFailed.
    """
    name, owner, source = store.read(spools.source_of, schedule)
    if not isinstance(source, PostedSource):
        cure = "make a schedule whose source is {'kind': 'posted'}"
        raise Conflict(f"the jobs of schedule {name} read a {source.kind} source", field="name", cure=cure)
    check_room(settings)
    # Looking at each file that waits takes a second for 50,000 of them.
    if owner is not None and store.read(keys.is_limited, owner):
        store.read(keys.check_bytes, owner, posted.bytes_of(store, settings, owner))
    posted.keep(settings, schedule, samples.lines)


def remove(store: Store, settings: Settings, which: Which) -> None:
    """Delete a schedule and the samples that wait for its next job; its jobs stay.

    Samples that cannot be removed now are tried again by the sweeper. Raises NotFound, WriteFailed.
    """
    posted.remove_spool(settings, store.write(schedules.remove, which))


def run_now(store: Store, settings: Settings, which: Which) -> RunView:
    """Make a job of a schedule outside its slots; if a quota or key refuses it, that is the run's outcome.

    Raises NotFound, Conflict, DiskFull.
    """
    check_room(settings)
    return store.write(schedules.run_now, which)


def run_slots(context: LoopContext) -> bool:
    """Decide every slot that is due; return False, since there is no more to do now."""
    submit_due(context.store, context.settings)
    return False


def submit_due(store: Store, settings: Settings) -> int:
    """Decide every slot that is due; return how many. Any number of processes may do so at once.

    Where the data folder is nearly full, slots that would become jobs are refused. Raises StoreUnavailable,
    DiskFull.
    """
    decided = 0
    for name in store.read(schedules.due):
        try:
            while store.write(schedules.advance, name, _no_room(settings)):
                decided += 1
        except STORE_AWAY:
            raise
        except Exception as error:
            # Supervisor: one schedule's bug must not hold up the others.
            logger.exception("schedule %s", name)
            why = error if isinstance(error, QuarryError) else internal_error(error)
            store.write(schedules.set_aside, name, f"the schedule is paused: {why}")
    return decided


def _no_room(settings: Settings) -> str | None:
    """Return why no job is made now; none where there is room. Raises StoreUnavailable."""
    try:
        check_room(settings)
    except DiskFull as error:
        return str(error)
    return None
