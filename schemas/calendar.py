"""When a schedule's slots are: a cron expression in a time zone, interpreted as Debian's cron does."""

import heapq
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import groupby, islice
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError
from pydantic import AwareDatetime, Field, field_validator

from schemas.base import Wire

CRON_FIELDS = 5
CLOCK_CHANGE = timedelta(hours=3)
"""How long before and after its nominal time a slot that a clock change moves is looked for."""


class Calendar(Wire):
    """The times of a schedule's slots, which are given in UTC.

    A slot at a fixed time that a clock change skips runs right after the gap; at a repeated time it runs
    once. Slots of every hour or minute follow real time.
    """

    cron: str = Field(max_length=200, description="minute, hour, day of month, month, day of week")
    time_zone: str = Field(default="UTC", max_length=64, description="such as Europe/Berlin")
    ends_at: AwareDatetime | None = Field(default=None, description="no slot is after this time")

    @field_validator("cron")
    @classmethod
    def _cron_expression(cls, cron: str) -> str:
        if len(cron.split()) != CRON_FIELDS:
            raise ValueError(f"a cron expression has {CRON_FIELDS} fields, as in '0 3 * * *'; got {cron!r}")
        try:
            next(CronSim(cron, datetime(2000, 1, 1, tzinfo=UTC)))
        except CronSimError as error:
            raise ValueError(f"{cron!r} is not a cron expression: {error}") from error
        except StopIteration:
            raise ValueError(f"no time matches {cron!r}") from None
        return cron

    @field_validator("time_zone")
    @classmethod
    def _known_zone(cls, name: str) -> str:
        if name not in _time_zones():
            raise ValueError(f"{name!r} is not a time zone; use a name such as Europe/Berlin, or UTC")
        return name

    def times(self) -> tuple[object, ...]:
        """Return the fields that determine the slots."""
        return self.cron, self.time_zone, self.ends_at

    def first_after(self, moment: datetime) -> datetime | None:
        """Return the first slot after `moment`, or none if the schedule has ended by then."""
        slots = self._slots(moment - CLOCK_CHANGE)
        slot = next((slot for slot in slots if slot > moment), None)
        return slot if slot is not None and (self.ends_at is None or slot <= self.ends_at) else None

    def last_until(self, moment: datetime) -> datetime | None:
        """Return the last slot that is not later than `moment`, or none."""
        limit = moment if self.ends_at is None else min(moment, self.ends_at)
        return next((slot for slot in self._slots(limit + CLOCK_CHANGE, reverse=True) if slot <= limit), None)

    def first_slots(self, moment: datetime, count: int) -> list[datetime]:
        """Return the first `count` slots after `moment`, or as many as there are."""
        slots = (slot for slot, _ in groupby(self._slots(moment - CLOCK_CHANGE)) if slot > moment)
        return [slot for slot in islice(slots, count) if self.ends_at is None or slot <= self.ends_at]

    def shown(self, at: datetime) -> str:
        """Return a time as its time zone's clocks show it: `Sat 2026-11-28 03:00 CET`."""
        return f"{at.astimezone(ZoneInfo(self.time_zone)):%a %Y-%m-%d %H:%M %Z}"

    def _slots(self, start: datetime, reverse: bool = False) -> Iterator[datetime]:
        """Yield slots from about `start` on, in order, some of them twice."""
        both = (self._slots_by_fold(start, reverse, fold) for fold in (0, 1))
        return heapq.merge(*both, reverse=reverse)

    def _slots_by_fold(self, start: datetime, reverse: bool, fold: int) -> Iterator[datetime]:
        """Yield slots in order; at a repeated local time, the first one or, with `fold` 1, the second.

        The library's own steps through a time zone lose a slot where clocks change by half an hour.
        """
        zone = ZoneInfo(self.time_zone)
        local = start.astimezone(zone).replace(tzinfo=None)
        minute, hour = self.cron.split()[:2]
        fixed = "*" not in minute[0] + hour[0]
        for wall in CronSim(self.cron, local, reverse=reverse):
            slot = wall.replace(tzinfo=zone, fold=0 if fixed else fold).astimezone(UTC)
            if slot.astimezone(zone).replace(tzinfo=None) == wall:
                yield slot
            elif fixed:
                yield _end_of_gap(wall, zone)


@cache  # it reads all files of the zones
def _time_zones() -> set[str]:
    return available_timezones()


def _end_of_gap(wall: datetime, zone: ZoneInfo) -> datetime:
    """Return the end of the gap in which the clocks skip a local time, to the second."""
    after, before = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    offset = before.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = before + (after - before) // 2
        if middle.astimezone(zone).utcoffset() == offset:
            before = middle
        else:
            after = middle
    return after.replace(microsecond=0)
