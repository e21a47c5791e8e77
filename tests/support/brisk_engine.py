"""The tests' engine, in a worker that stores some captured units at once, and soon the next ones."""

from datetime import timedelta

from service.store import storing
from tests.support.fake_engine import FakeEngine

storing.FULL_FILES, storing.APART = 20, timedelta(seconds=1)


class BriskEngine(FakeEngine):
    """The tests' engine."""
