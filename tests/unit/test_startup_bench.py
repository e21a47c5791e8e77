"""The arithmetic of what a start-up's time goes to; no engine, and no claim about a time."""

from pathlib import Path

import pytest

from benchmarks.startup import AT, BARE, QUARRY, report, summary
from benchmarks.startup_marks import FILE, first_marks, mark


def test_the_first_mark_of_a_stage_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "marks"))
    mark("a step", 12.5)
    mark("the start", 11.0)
    mark("a step", 12.25)
    found = first_marks((tmp_path / "marks").read_text().splitlines(), 10.0)
    assert list(found.items()) == [("the start", 1.0), ("a step", 2.25)]


def test_a_row_is_held_against_vllm_alone_in_its_own_round() -> None:
    rounds = {
        QUARRY: [{AT[QUARRY]: 3.0, "begun": 1.0}, {AT[QUARRY]: 8.0, "begun": 2.0, "now and then": 1.0}],
        BARE: [{AT[BARE]: 2.0}, {AT[BARE]: 8.0}],
    }
    found = summary(rounds)
    assert found[QUARRY]["ratio"] == {"median": 1.25, "low": 1.0, "high": 1.5}
    assert list(found[QUARRY]["stages_s"]) == ["begun", AT[QUARRY]], "a stage of one round is left out"
    assert "  5.50 (3.00..8.00)" in report(found)
