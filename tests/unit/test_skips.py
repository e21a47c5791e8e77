"""What becomes of a skipped test at the desk and in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no server")
def test_by_a_condition(): ...

def test_by_a_call():
    pytest.skip("no server")

@pytest.mark.outside
@pytest.mark.skipif(True, reason="no tiles")
def test_outside(): ...

@pytest.mark.xfail(reason="known")
def test_expected():
    assert False
"""


@pytest.mark.parametrize(
    ("ci", "counts"), [("", "3 skipped, 1 xfailed"), ("true", "1 failed, 1 skipped, 1 xfailed, 1 error")]
)
def test_only_what_pip_cannot_install_may_be_skipped_in_ci(tmp_path: Path, ci: str, counts: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.skips",
        "-c",
        ROOT / "pyproject.toml",
        tmp_path,
    ]
    environment = {**os.environ, "CI": ci}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert counts in done.stdout.splitlines()[-1], done.stdout
    assert done.returncode == (1 if ci else 0)
