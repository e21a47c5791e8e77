"""The command line run in this process, and a small dataset."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.cli import main
from tests.support.reference_models import TinyModel
from tests.support.shards import capture, write_dataset


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]
HOSTILE = "\x1b[2J\x1b[9A\u202e\x9b1A\nthe dataset is right"


def assert_shown(printed: str) -> None:
    """Check that `HOSTILE` is in what was printed, and can do nothing there."""
    assert "<U+001B>[2J<U+001B>[9A<U+202E><U+009B>1A<U+000A>the dataset is right" in printed
    assert not set("\x1b\u202e\x9b") & set(printed)
    assert "the dataset is right" not in printed.splitlines()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process."""

    def run_it(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in arguments])
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, printed.out, printed.err)

    return run_it


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("target") / "model", "llama", "bfloat16")


@pytest.fixture
def dataset(tmp_path: Path, model: TinyModel) -> Path:
    write_dataset(tmp_path / "dataset", {0: capture(model, dtype="bfloat16", lengths=(3, 5))})
    return tmp_path / "dataset"
