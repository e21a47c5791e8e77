"""The part `suites`: tests that start the engine, on the device that is there."""

import re
import subprocess
import sys
from argparse import Namespace
from collections import Counter

from benchmarks.gpu.figures import Save

TESTS = (
    "tests/e2e/test_hazards_cache.py",
    "tests/e2e/test_hazards_requests.py",
    "tests/e2e/test_hazards_hybrid.py",
    "tests/drill/test_on_vllm.py",
    "tests/e2e/test_two_models.py",
    "tests/e2e/test_compiled.py",
    "tests/e2e/test_generate.py",
    "tests/e2e/test_turns.py",
)
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b.*?(tests/\S+)")
"""As pytest's workers print it."""


def run_suites(options: Namespace, save: Save) -> None:
    """Run each file's tests in a process; save each outcome when it is known. Raises RuntimeError."""
    folder = options.folder.resolve() / "suites"
    words = [sys.executable, "-m", "pytest", "-v", "-p", "no:warnings", "-p", "no:cacheprovider"]
    tests = [name for name in TESTS if not options.only or name in options.only]
    words += ["-n", str(len(tests)), "--dist", "loadfile", "--basetemp", str(folder), "-m", "engine", *tests]
    outcomes: dict[str, str] = {}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            if found := OUTCOME.search(line):
                outcomes[found[2]] = found[1]
                save("tests", outcomes)
    save("counts", dict(Counter(outcomes.values())))
    if running.returncode != 0:
        raise RuntimeError(f"pytest ended with status {running.returncode}")
