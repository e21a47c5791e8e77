import pytest

from service.api import auth
from service.errors import QuotaExceeded


def test_requests_are_counted_anew_in_each_minute(monkeypatch: pytest.MonkeyPatch):
    now = 3600.0
    monkeypatch.setattr(auth.time, "monotonic", lambda: now)
    counts = auth.RequestCounts()
    for minute in range(3):
        now = 3600.0 + 60 * minute
        for _ in range(2):
            counts.add("ci", limit=2)
        counts.add("other", limit=2)
        with pytest.raises(QuotaExceeded, match="2 requests a minute"):
            counts.add("ci", limit=2)
