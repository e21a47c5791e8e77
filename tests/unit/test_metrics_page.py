"""The metrics are those of the page, their names say their units, and a label has few values."""

import re

import pytest

from tests.support.metrics_page import PAGE, Row, of_api, of_worker, with_tables

ROWS = [*of_api(), *of_worker()]
UNITS = "seconds|bytes|samples|tokens|units|workers|writers|jobs|deaths"
LABELS = {"state", "kind", "reason", "rank", "worker", "host", "host_id", "model", "schedule"}
"""States, kinds and reasons, which the code has; ranks, workers, hosts, models, schedules: there are few."""


def test_the_page_has_every_metric_with_its_labels_and_its_meaning() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.support.metrics_page"


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_a_name_ends_with_its_unit_and_its_type(row: Row) -> None:
    unit = row.name.removesuffix("_total")
    assert re.fullmatch(rf"quarry_([a-z]+_)*({UNITS})|quarry_schedule_failing", unit), row.name
    assert row.name.endswith("_total") == (row.type == "counter")
    assert row.help.endswith(".") and row.help.isascii()
    assert set(row.labels) <= LABELS


def test_no_name_is_there_twice() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
