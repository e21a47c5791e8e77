"""A Hub that is away for a while when an engine's weights are fetched."""

import time
from pathlib import Path

import pytest

from schemas.job import JobState
from service.capture import session
from service.errors import HubUnavailable
from service.plan.target import Target
from service.settings import Settings
from service.store import jobs
from tests.support.jobs import Shop, conversations, request


def test_a_short_outage_of_the_hub_ends_no_job(
    shop: Shop, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More attempts meet it than a unit has, and a wait that the Hub asks for is kept."""
    shop.settings = shop.settings.model_copy(update={"lease_s": 1.0, "unit_attempts": 1})
    fetch, asked_s = session.fetch_weights, [0.0]

    def away(wanted: Target, settings: Settings) -> Path:
        asked_s.append(time.monotonic())
        if len(asked_s) > 3:
            return fetch(wanted, settings)
        error = HubUnavailable("the Hub did not answer")
        error.wait_s = 2.0
        raise error

    monkeypatch.setattr(session, "fetch_weights", away)
    job_id = shop.submit(request(target, conversations(40)))
    assert shop.finish(job_id).state is JobState.COMPLETED
    assert len(asked_s) > 3 and asked_s[2] - asked_s[1] >= 2.0
    told = [event.problem for event in shop.store.read(jobs.events, job_id) if event.problem]
    assert [problem.type for problem in told] == ["urn:quarry:hub-unavailable"] * 2
