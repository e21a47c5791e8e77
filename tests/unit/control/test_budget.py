from contextlib import ExitStack, suppress

import pytest

from service.control import budget
from service.control.budget import Budget, Taken
from service.errors import QuotaExceeded, ServiceBusy
from service.settings import Settings


def test_requests_are_counted_anew_in_each_minute(monkeypatch: pytest.MonkeyPatch):
    now = 3600.0
    monkeypatch.setattr(budget.time, "monotonic", lambda: now)
    counts = Budget(Settings())
    for minute in range(3):
        now = 3600.0 + 60 * minute
        for _ in range(2):
            counts.count_request("ci", limit=2)
        counts.count_request("other", limit=2)
        with pytest.raises(QuotaExceeded, match="2 requests a minute"):
            counts.count_request("ci", limit=2)


def test_a_request_whose_turn_to_be_checked_does_not_come_is_to_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(budget, "CHECK_WAIT_S", 0.0)
    turns = Budget(Settings())
    with turns.checking("team-a"):
        for _ in range(2):
            with pytest.raises(ServiceBusy) as busy, turns.checking("team-a"):
                pass
            assert busy.value.status == 503 and busy.value.cure
            with turns.checking("team-b"), pytest.raises(ServiceBusy), turns.checking("team-c"):
                pass


@pytest.mark.parametrize("connections", [16, 1000])
def test_what_is_in_work_leaves_connections_for_those_that_come(connections: int):
    all_taken, in_work = Budget(Settings(max_connections=connections)), 0
    with ExitStack() as taken:
        for what in (Taken.REQUESTS, Taken.DOWNLOADS, Taken.STREAMS):
            with suppress(QuotaExceeded):
                for number in range(connections):
                    taken.enter_context(all_taken.taking(f"team-{number}", what))
                    in_work += 1
    assert 3 <= in_work < connections
