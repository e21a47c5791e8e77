"""How long a call that may itself be long is tried again: its waits count, and not what it took."""

from collections.abc import Callable

import pytest

from service.artifacts.hub_client import Passing
from service.artifacts.repository import Patience
from service.errors import HubUnavailable

NO_TIME_S = 1e-9
"""A deadline that is over when any call returns."""


def failing(times: int) -> Callable[[], str]:
    """Return a call that fails so many times first."""
    errors = [Passing("no")] * times

    def call() -> str:
        if errors:
            raise errors.pop()
        return "done"

    return call


def patience(deadline_s: float, sleep: Callable[[float], None] = lambda _: None) -> Patience:
    return Patience(attempts=3, first_wait_s=0.0, longest_wait_s=0.0, deadline_s=deadline_s, sleep=sleep)


def test_a_long_call_that_outlasted_the_deadline_has_all_its_tries() -> None:
    assert patience(NO_TIME_S).retry(failing(2), long=True) == "done"
    with pytest.raises(HubUnavailable):
        patience(NO_TIME_S).retry(failing(3), long=True)


def test_a_short_call_that_outlasted_the_deadline_is_not_made_again() -> None:
    with pytest.raises(HubUnavailable):
        patience(NO_TIME_S).retry(failing(1))


def test_those_that_fail_together_come_back_apart() -> None:
    last: list[float] = []
    for _ in range(30):
        waits: list[float] = []
        assert Patience(sleep=waits.append).retry(failing(5)) == "done"
        last.append(waits[-1])
    assert min(last) >= 16.0
    assert max(last) - min(last) > 4.0


def test_the_waits_of_a_long_call_end_before_the_deadline() -> None:
    waits: list[float] = []

    def busy() -> None:
        raise Passing("busy", 60.0)

    with pytest.raises(HubUnavailable) as away:
        patience(100.0, waits.append).retry(busy, long=True)
    assert waits == [60.0] and away.value.wait_s == 60.0, "what was asked for is passed on"
