"""What all tests have in common: none is judged by speed or skipped in CI, and torch's math is settled."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from connector.vector_math import settle_vector_math
from tests.support.pg import Postgres, running_postgres
from tests.support.skips import pytest_runtest_makereport  # noqa: F401 - a hook

settings.register_profile("quarry", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quarry")

# Tests run in a process a core: threads of torch would only wait for each other, in children too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As on one GPU, an engine's only worker is in the process of its core. vLLM's CPU platform would start one
# more for it, which takes as much again of few cores: for those that need it see `worker_apart`.
IN_CORE = "VLLM_ENABLE_V1_MULTIPROCESSING"
os.environ.setdefault(IN_CORE, "0")

LONGEST = frozenset({"e2e", "drill"})
"""The folders of the longest files. Within them, and behind them, orders are random."""

# The models in transformers that captures are held against run in the tests' own process.
settle_vector_math()


def pytest_xdist_auto_num_workers() -> int:
    """Return how many test processes run: more than cores, since tests wait as long as they compute."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses PostgreSQL. Begin with the longest files: none is then left alone at the end."""
    for item in items:
        if uses_postgresql(item):
            item.add_marker("postgresql")
    items.sort(key=lambda item: LONGEST.isdisjoint(item.path.parts))


def uses_postgresql(item: pytest.Item) -> bool:
    params = getattr(item, "callspec", None)
    names = getattr(item, "fixturenames", ())
    return "postgres" in names or (params is not None and "postgresql" in params.params.values())


@pytest.fixture
def worker_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM give an engine's worker a process of its own, as for a user, which a killed core may leave."""
    monkeypatch.delenv(IN_CORE)


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
