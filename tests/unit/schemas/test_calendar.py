"""Slots of cron expressions, held against each quarter of an hour of a year in zones that dateutil reads."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache

import pytest
from dateutil import tz
from pydantic import ValidationError

from schemas.calendar import Calendar

ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Africa/Casablanca"),
    *("Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Chatham", "Europe/Dublin"),
)
START = datetime(2027, 1, 1, tzinfo=UTC)
QUARTER = timedelta(minutes=15)
QUARTERS = [START + QUARTER * number for number in range(4 * 24 * 365)]


def is_weekday(local: datetime) -> bool:
    return local.weekday() < 5


ROWS: dict[str, tuple[Callable[[datetime], bool], bool]] = {
    "30 2 * * *": (lambda t: (t.hour, t.minute) == (2, 30), True),
    "15 1,3 * * 1-5": (lambda t: t.minute == 15 and t.hour in (1, 3) and is_weekday(t), True),
    "0 0 1 * *": (lambda t: (t.day, t.hour, t.minute) == (1, 0, 0), True),
    "*/15 0-3 * * *": (lambda t: t.hour < 4, False),
    "0 */6 * * 7": (lambda t: t.minute == 0 and t.hour % 6 == 0 and t.weekday() == 6, False),
}
"""By cron expression: whether a local time is a slot, and whether its times are fixed."""


@cache
def local_times(zone: str) -> list[tuple[datetime, bool]]:
    """Return the local time of every quarter, and whether it is there a second time."""
    local = [quarter.astimezone(tz.gettz(zone)) for quarter in QUARTERS]
    return [(time.replace(tzinfo=None, fold=0), bool(time.fold)) for time in local]


def expected(cron: str, zone: str) -> list[datetime]:
    """Return the year's slots. At fixed times a repeated one is once, and a skipped one is after the gap."""
    is_slot, fixed = ROWS[cron]
    slots = []
    last = local_times(zone)[0][0]
    for quarter, (local, repeated) in zip(QUARTERS, local_times(zone), strict=True):
        skipped = [last + QUARTER * number for number in range(1, (local - last) // QUARTER)]
        if (is_slot(local) and not (fixed and repeated)) or (fixed and any(map(is_slot, skipped))):
            slots.append(quarter)
        last = local
    return slots


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("cron", ROWS)
def test_the_slots_of_a_year_are_those_of_another_calendar(cron: str, zone: str) -> None:
    slots = expected(cron, zone)
    assert slots
    calendar = Calendar(cron=cron, time_zone=zone)
    assert calendar.first_slots(START - timedelta(seconds=1), len(slots)) == slots
    for before, slot in zip(slots[:-1:31], slots[1::31], strict=False):
        assert calendar.first_after(before) == slot
        assert calendar.last_until(slot) == slot
        assert calendar.last_until(slot - timedelta(seconds=1)) == before


def test_a_gap_and_a_repeated_hour_are_in_the_year() -> None:
    """Berlin skips 02:30 on 28 March and has it twice on 31 October."""
    slots = Calendar(cron="30 2 * * *", time_zone="Europe/Berlin").first_slots(START, 365)
    assert datetime(2027, 3, 28, 1, 0, tzinfo=UTC) in slots
    assert datetime(2027, 10, 31, 0, 30, tzinfo=UTC) in slots
    assert datetime(2027, 10, 31, 1, 30, tzinfo=UTC) not in slots


@pytest.mark.parametrize(
    ("zone", "at", "shown"),
    [
        ("UTC", "2027-07-01T01:00+00:00", "Thu 2027-07-01 01:00 UTC"),
        ("Europe/Berlin", "2027-07-01T23:30+00:00", "Fri 2027-07-02 01:30 CEST"),
        ("America/Sao_Paulo", "2027-07-01T01:00+00:00", "Wed 2027-06-30 22:00 -03"),
    ],
)
def test_a_time_is_shown_by_the_clocks_of_its_zone(zone: str, at: str, shown: str) -> None:
    assert Calendar(cron="0 3 * * *", time_zone=zone).shown(datetime.fromisoformat(at)) == shown


def test_a_calendar_ends() -> None:
    calendar = Calendar(cron="0 * * * *", ends_at=START + timedelta(hours=2))
    assert calendar.first_slots(START, 5) == [START + timedelta(hours=1), START + timedelta(hours=2)]
    assert calendar.first_after(START + timedelta(hours=2)) is None
    assert calendar.last_until(START + timedelta(hours=9)) == START + timedelta(hours=2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cron", "0 3 * *", "5 fields"),
        ("cron", "* * * * * *", "5 fields"),
        ("cron", "@daily", "5 fields"),
        ("cron", "61 * * * *", "Bad minute"),
        ("cron", "0 0 30 2 *", "Bad day-of-month"),
        ("time_zone", "Europe/Atlantis", "is not a time zone"),
        ("time_zone", "../../etc/localtime", "is not a time zone"),
        ("ends_at", "2027-01-01T00:00:00", "timezone"),
    ],
)
def test_what_is_no_calendar_is_refused_by_field(field: str, value: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as refused:
        Calendar.model_validate({"cron": "0 3 * * *", field: value})
    assert [error["loc"] for error in refused.value.errors()] == [(field,)]
