"""The examples are run as a newcomer runs them: on vLLM, with the small target."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("worker_apart")


def run(example: str, *options: str) -> str:
    command = [sys.executable, "-m", f"examples.{example}", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.engine
def test_the_demo_ends_with_a_row() -> None:
    said = run("demo")
    assert "the dataset is right" in said
    assert re.search(r"layer_8 .* mean norm [0-9.]+", said)


@pytest.mark.long
@pytest.mark.engine
def test_nights_pass_and_their_rows_are_on_the_hub() -> None:
    """1. A night that is run now and one at its minute. 2. A reader has the rows of both, each once."""
    said = run("nights", "--nights", "2")
    assert re.findall(r"night \d: j-\w+ wrote (\d+) new samples", said) == ["20", "20"]
    assert "40 rows on the Hub; the first has {'input_ids': [" in said
