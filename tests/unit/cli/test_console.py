"""Tables at the widths that terminals have."""

import io
import re
import sys

import pytest

from service.cli.console import show_table

HEADS = ("id", "state", "progress", "model", "waits")
ROWS = [
    ("j-0123456789abcdef", "running", "3/9 samples, 1 rejected", "/models/a-target-with-a-long-name", ""),
    ("j-fedcba9876543210", "queued", "0/0+ samples", "/models/tiny", ""),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, width: int, rows: list[tuple[str, ...]]) -> str:
    """Return what a terminal of this width shows, without its emphasis."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    show_table(HEADS, rows)
    return re.sub(r"\x1b\[\d*m", "", terminal.getvalue())


@pytest.mark.parametrize("width", [64, 80, 200])
def test_a_table_fits_the_terminal_without_columns_that_are_empty(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    text = printed(monkeypatch, width, ROWS)
    lines = text.splitlines()
    assert lines[0].split() == ["id", "state", "progress", "model"]
    assert max(map(len, lines)) <= width
    assert [line[:18].strip() for line in lines if line[0] != " "] == ["id", *(row[0] for row in ROWS)]
    assert {"rejected", "samples,"} <= set(text.split()), "no word is cut"


def test_where_a_table_is_too_wide_the_fields_of_a_row_stand_under_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = printed(monkeypatch, 60, ROWS).strip().split("\n\n")
    assert first.splitlines() == [
        f"{head:8}  {field}" for head, field in zip(HEADS, ROWS[0], strict=True) if field
    ]
    assert second.startswith("id        j-fedcba9876543210\n")


def test_a_table_without_rows_shows_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(monkeypatch, 60, []).split() == list(HEADS)
