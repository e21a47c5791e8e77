"""Makes schedules whose requests have been checked, and jobs of the slots that have come."""

from schemas.schedule import NewSchedule, ScheduleChange, ScheduleRules, ScheduleState, ScheduleView
from service.control.request_body import parse_body
from service.control.submit import check
from service.settings import Settings
from service.store import Store, schedules


def add(store: Store, settings: Settings, schedule: NewSchedule) -> ScheduleView:
    """Keep a schedule whose request could be submitted now.

    Raises Conflict if its name is taken, and what `submit` raises.
    """
    check(schedule.request, settings, may_be_empty=True)
    return store.write(schedules.add, schedule)


def preview(store: Store, settings: Settings, schedule: NewSchedule) -> ScheduleView:
    """Return the schedule as it would be, and keep nothing. Raises as `add` does."""
    check(schedule.request, settings, may_be_empty=True)
    with store.writing() as tx:
        view = schedules.add(tx, schedule)
        tx.connection.rollback()
    return view


def change(store: Store, name: str, changed: ScheduleChange) -> ScheduleView:
    """Change what is given of a schedule's rules, or pause it. Raises NotFound, RequestError."""
    before = store.read(schedules.schedule_view, name)
    document = before.rules().model_dump() | changed.model_dump(exclude_unset=True, exclude={"paused"})
    rules = parse_body(ScheduleRules, document)
    paused = before.state is ScheduleState.PAUSED if changed.paused is None else changed.paused
    return store.write(schedules.change, name, rules, paused)


def submit_due(store: Store) -> int:
    """Decide on every slot that has come; return on how many. Any number of processes may do so at once."""
    decided = 0
    for name in store.read(schedules.due):
        while store.write(schedules.advance, name):
            decided += 1
    return decided
