"""The wait that an HTTP answer asks for in its Retry-After header."""

from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def asked_wait_s(retry_after: str, longest_s: float) -> float | None:
    """Return the seconds of a header that holds a number or a date (RFC 9110, 10.2.3); None of any other."""
    asked = retry_after.strip()
    if asked.isascii() and asked.isdigit():
        return min(float(asked), longest_s)
    with suppress(ValueError, OverflowError):
        until = parsedate_to_datetime(asked).replace(tzinfo=UTC)
        return min(max((until - datetime.now(UTC)).total_seconds(), 0.0), longest_s)
    return None
