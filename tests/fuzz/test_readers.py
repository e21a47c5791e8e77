"""Readers of files and of the engine's socket, fed with damaged bytes by libFuzzer.

`FUZZ_SECONDS` is how long each is fed; `make fuzz` sets it.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = int(os.environ.get("FUZZ_SECONDS", "3"))
NAMES = ("shard", "index", "counts", "manifest", "jobs", "norm", "socket")
ENDED_BY_PYARROW = "ERROR: libFuzzer: deadly signal"
"""Over some footers it aborts. Nothing is read then: `quarry verify` says that the file is broken."""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("name", NAMES)
def test_a_reader_raises_its_own_errors_alone(tmp_path: Path, name: str) -> None:
    end, runs = time.monotonic() + SECONDS, 0
    while runs == 0 or time.monotonic() < end:
        seconds = max(1, int(end - time.monotonic()))
        # Between us and libFuzzer, which would take the most that this process ever had for its own memory.
        parent = ["timeout", str(SECONDS + 100)]
        command = [*parent, sys.executable, "-m", "tests.fuzz.readers", name, str(tmp_path)]
        done = subprocess.run([*command, f"-max_total_time={seconds}"], capture_output=True, text=True)
        assert done.returncode == 0 or ENDED_BY_PYARROW in done.stderr, done.stderr[-3000:]
        runs += 1
    print(f"{name}: {runs} runs")
