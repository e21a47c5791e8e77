"""Which tests reach which site: one traced run of every fast test, kept until a source of it changes."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.mutants.forks import Run, run_all
from tests.mutants.switch import TRACE

FOLDERS = ("unit", "contract", "drill")
LEFT_OUT = ("contract/export/", "unit/export/", "unit/test_")
"""Tests of the exports of a finished dataset, and of the benchmarks."""
FAST = "not long and not engine and not crash"
LINK, SHARED = "under-way", "shared"
FILE_LIMIT_S = 600.0


@dataclass(frozen=True)
class Traced:
    """A test that passed: its seconds with those of fixtures made for it, and the sites that it reached."""

    name: str
    seconds: float
    sites: list[str]


def point(link: Path, file: Path) -> None:
    """Make `link` name `file`, at no moment nothing."""
    new = link.with_suffix(".new")
    new.symlink_to(file)
    new.replace(link)


class Recorder:
    """Traces each test to a file of its own, and at the end writes down those that passed."""

    def __init__(self, folder: Path, record: Path) -> None:
        self._folder, self._record = folder, record
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        point(self._folder / LINK, self._trace(nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """Trace what several tests share apart: any of them may be the one that looks at it."""
        if fixturedef.scope == "function":
            return (yield)
        test = (self._folder / LINK).readlink()
        point(self._folder / LINK, self._folder / SHARED)
        try:
            return (yield)
        finally:
            point(self._folder / LINK, test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        tests = [
            asdict(Traced(name, round(seconds, 3), sorted(self._sites(name))))
            for name, seconds in self._seconds.items()
            if name not in self._failed
        ]
        self._record.write_text(json.dumps({"tests": tests, "failed": sorted(self._failed)}))

    def _trace(self, nodeid: str) -> Path:
        return self._folder / hashlib.sha256(nodeid.encode()).hexdigest()[:16]

    def _sites(self, nodeid: str) -> set[str]:
        traces = (self._trace(nodeid), self._folder / SHARED)
        return {site for trace in traces if trace.exists() for site in trace.read_text().split("\n") if site}


def trace_tests(root: Path, work: Path, folders: Iterable[str]) -> tuple[list[Traced], list[str]]:
    """Return the fast tests of some folders that pass, and the names of files and tests that do not."""
    ours = root / "tests" / "mutants"
    sources = (path for path in sorted(root.rglob("*.py")) if ours not in path.parents)
    product = _digest(path for path in sources if not path.name.startswith("test_"))
    records = {
        name: work / "reach" / f"{product}-{_digest([path])}.json"
        for folder in folders
        for path in sorted(
            (root / "tests").glob(folder if folder.endswith(".py") else f"{folder}/**/test_*.py")
        )
        if not (name := path.relative_to(root).as_posix()).startswith(
            tuple(f"tests/{out}" for out in LEFT_OUT)
        )
    }
    new = [_run(name, record, work) for name, record in records.items() if not record.exists()]
    for run, _, seconds in run_all(new):
        print(f"  {seconds:6.1f} s  {run.name}", flush=True)
    tests, failed = [], []
    for name, record in records.items():
        told = json.loads(record.read_text()) if record.exists() else {"tests": [], "failed": [name]}
        tests += [Traced(**test) for test in told["tests"]]
        failed += told["failed"]
    return tests, failed


def _run(name: str, record: Path, work: Path) -> Run:
    traces = work / "traces" / name.replace("/", ".")
    traces.mkdir(parents=True, exist_ok=True)
    for trace in traces.iterdir():
        trace.unlink()
    point(traces / LINK, traces / SHARED)
    record.parent.mkdir(exist_ok=True)
    return Run(
        name=name,
        arguments=["-m", FAST, name],
        environment={TRACE: str(traces / LINK)},
        output=traces.with_suffix(".txt"),
        limit_s=FILE_LIMIT_S,
        plugins=lambda: [Recorder(traces, record)],
    )


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
