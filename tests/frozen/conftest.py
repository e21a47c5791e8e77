"""Old databases are loaded on SQLite and on a real PostgreSQL; what is pushed goes to the tests' own Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frozen.values import HERE
from tests.support.desk import writable_hub
from tests.support.fake_hub import FakeHub
from tests.support.pg import Postgres, running_postgres


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
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(HERE)  # the jobs name their model `./target`
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub
