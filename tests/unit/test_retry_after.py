"""What a Retry-After header asks for."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from service.retry_after import asked_wait_s


@pytest.mark.parametrize(
    ("asked", "wait_s"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("86400", 60.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Sun Nov  6 08:49:37 1994", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 60.0),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("\u00b2", None),
        ("soon", None),
        ("Sun, 99 Nov 1994 08:49:37 GMT", None),
        ("Sun, 06 Nov 99999999999 08:49:37 GMT", None),
    ],
)
def test_a_number_or_a_date_is_a_wait(asked: str, wait_s: float | None) -> None:
    assert asked_wait_s(asked, 60.0) == wait_s


def test_a_date_is_so_far_from_now() -> None:
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=1000), usegmt=True)
    wait_s = asked_wait_s(at, 3600.0)
    assert wait_s is not None and 900.0 < wait_s <= 1000.0
