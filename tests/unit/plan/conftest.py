"""Fixtures of the tests of planning."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeHub
from tests.support.store_cases import Clock
from tests.unit.plan.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    opened = House(tmp_path, Clock())
    yield opened
    opened.store.close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Return an empty Hub, with caches of its own here and nobody at the usual address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with FakeHub(cas=tmp_path / "cas") as opened:
        yield opened
