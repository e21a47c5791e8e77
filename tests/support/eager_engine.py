"""The tests' engine, in a worker that stores each captured unit as soon as it can."""

from datetime import timedelta

from service.store import storing
from tests.support.fake_engine import FakeEngine

storing.FULL_FILES, storing.APART, storing.LATEST = 1, timedelta(0), timedelta(0)


class EagerEngine(FakeEngine):
    """The tests' engine."""
