"""Which cases of the crash suite run: a short form, a seeded sample (`make crash`), or all.

The short form is in `make test` and `make test-all`.
A test that has no short form is marked `long`; one that has is run by all three, and asks `chosen` for its
cases. Workers of one run sample alike, because they find the seed in the environment.
"""

import os
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from tests.crash.house import House

T = TypeVar("T")

MODE = os.environ.get("CRASH", "short")
"""`short`, `sample` or `all`."""
SEED = os.environ.get("SEED") or ("7" if MODE == "short" else str(secrets.randbelow(10_000)))
os.environ["SEED"] = SEED


def chosen(name: str, cases: Sequence[T], *, sample: int, short: int = 1) -> list[T]:
    """Return the cases that this run takes, in their order: all, `sample` of them, or `short` of them.

    `name` says which draw it is, so that two tests with one seed do not draw the same numbers.
    """
    wanted = {"all": len(cases), "sample": sample, "short": short}[MODE]
    drawn = random.Random(f"{SEED}:{name}").sample(range(len(cases)), min(wanted, len(cases)))
    return [cases[number] for number in sorted(drawn)]


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """Count here what was done (`kills`, `EIO`): the run's end shows the sums of all tests."""
    counted: Counter[str] = Counter()
    yield counted
    request.node.user_properties.append(("crash", dict(counted)))


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator["House"]:
    from tests.crash.faults import build_shim, open_server
    from tests.crash.house import House

    open_server(build_shim(tmp_path_factory.mktemp("shim")))
    with tempfile.TemporaryDirectory(prefix="quarry-crash-") as folder:
        yield House(Path(folder))


def pytest_report_header() -> str:
    return f"crash suite: CRASH={MODE} SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    sums: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                sums.update(dict(report.user_properties).get("crash", {}))
    if sums:
        done = ", ".join(f"{count} {name}" for name, count in sorted(sums.items()))
        terminalreporter.write_line(f"crash suite, SEED={SEED}: {done}")
