"""A skip proves nothing: it is a failure in CI, unless the test is marked `outside`."""

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test fail that was skipped in CI; an expected failure (xfail) is none."""
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("outside") is not None
    if report.skipped and not expected and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, and not marked `outside`: {report.longrepr}"
    return report
