"""One target, its reference and a healthy dataset for the whole drill."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drill.harness import Drill, dataset_of, one_reference
from tests.support.tiny_model import random_target


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_target(tmp_path_factory.mktemp("models") / "target", hidden=64, max_position=512)


@pytest.fixture(scope="package")
def shared(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    with pytest.MonkeyPatch.context() as monkeypatch, one_reference(monkeypatch):
        yield Drill(target, monkeypatch, tmp_path_factory.mktemp("drill"))


@pytest.fixture
def drill(shared: Drill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Drill:
    return Drill(shared.target, monkeypatch, tmp_path)


@pytest.fixture(scope="package")
def dataset(shared: Drill) -> Path:
    return dataset_of(shared)
