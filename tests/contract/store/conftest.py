"""The tests of this folder run on SQLite and on a real PostgreSQL, with a clock that only a test moves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.store import Store
from service.store.database import Database
from tests.support.pg import Postgres, running_postgres
from tests.support.store_cases import Clock


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'quarry.db'}"
    else:
        server: Postgres = request.getfixturevalue("postgres")
        with server.database() as lent:
            yield lent


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    opened = Store(url, clock)
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def database(store: Store, url: str, clock: Clock) -> Iterator[Database]:
    """Transactions on the tables of `store`, for what no verb can bring about on purpose."""
    opened = Database(url, clock)
    yield opened
    opened.close()
