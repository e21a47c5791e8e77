"""What is pushed goes to the tests' own Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frozen.values import HERE
from tests.support.desk import writable_hub
from tests.support.fake_hub import FakeHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(HERE)  # the jobs name their model `./target`
    with writable_hub(tmp_path, monkeypatch) as hub:
        yield hub
