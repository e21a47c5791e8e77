"""A job that waits to be pushed, for tests of what a push meets on its way."""

from collections.abc import Callable
from pathlib import Path

from schemas.events import Event
from schemas.job import JobState, JobSummary
from schemas.request import HubTarget
from service.artifacts.repository import Patience
from service.settings import Settings
from service.store import Store, jobs, migration
from tests.support.desk import REPO, TOKEN
from tests.support.fake_hub import FakeHub
from tests.support.finished_job import JOB, OWNER, a_request, run_to_publishing
from tests.support.roles import run_publishing
from tests.support.store_cases import Clock

HOUR_S = 3600.0
ATTEMPTS = 3
"""At a push, before a person is waited for."""
UNITS = 10


class Press:
    """A job that is ready to be published, and a publisher that takes it whenever the last lease is over."""

    def __init__(self, root: Path, hub: FakeHub, units: int = UNITS) -> None:
        self.clock = Clock(1_000_000_000.0)  # long before now: the store's clock alone counts
        self.settings = Settings(
            data_dir=root / "data", hub_endpoint=hub.url, hub_token=TOKEN, publish_attempts=ATTEMPTS
        )
        self.store = Store(self.settings.database(), self.clock.of(self.settings.database()))
        self.store.write(migration.migrate)
        request = a_request(HubTarget(repo_id=REPO))
        run_to_publishing(self.store, self.settings.dataset_dir(JOB), JOB, request, num_units=units)

    def publish(
        self,
        later_s: float = 0.0,
        patience: Patience | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> JobSummary:
        """Publish once, under a lease of its own; return the job."""
        self.clock.advance(self.settings.lease_s + 1 + later_s)
        patience = patience or Patience(attempts=3, sleep=lambda _: None)
        assert run_publishing(self.store, self.settings, OWNER, stopped, patience=patience)
        return self.store.read(jobs.job, JOB).view()

    def told(self) -> list[Event]:
        """Return the job's events since its publishing began."""
        events = self.store.read(jobs.events, JOB)
        began = next(n for n, event in enumerate(events) if event.state is JobState.PUBLISHING)
        return events[began + 1 :]
