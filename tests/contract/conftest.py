"""A small model, and jobs of it run by the fake engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import templates
from tests.support.fake_engine import FakeEngine
from tests.support.jobs import Shop
from tests.support.nights import Faults
from tests.support.talked import Talked
from tests.support.talking_engine import TalkingEngine
from tests.support.tiny_model import random_target


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return random_target(folder, hidden=64, max_position=512)


@pytest.fixture
def shop(tmp_path: Path, target: Path) -> Iterator[Shop]:
    opened = Shop.open(tmp_path, target)
    yield opened
    opened.store.close()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    healthy, planted = FakeEngine.run, Faults()

    async def run(self, prompt):
        await planted.meet()
        return await healthy(self, prompt)

    monkeypatch.setattr(FakeEngine, "run", run)
    return planted


@pytest.fixture
def talked(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Talked]:
    made = Talked(tmp_path, getattr(request, "param", templates.CHATML))
    TalkingEngine.said_ids = []
    yield made
    made.shop.store.close()
