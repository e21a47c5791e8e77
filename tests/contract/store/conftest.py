"""The tests of this folder run on SQLite and on a real PostgreSQL, with a clock that only a test moves."""

from collections.abc import Iterator

import pytest

from service.store import Store, migration
from tests.support.store_cases import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    opened = Store(url, clock.of(url))
    opened.write(migration.migrate)
    yield opened
    opened.close()


@pytest.fixture
def database(store: Store, url: str, clock: Clock) -> Iterator[Store]:
    """Transactions on the tables of `store`, for what no verb can bring about on purpose."""
    opened = Store(url, clock.of(url))
    yield opened
    opened.close()
