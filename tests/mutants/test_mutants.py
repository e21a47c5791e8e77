"""The mutator on small sources: which sites it finds, and what each does when it is the mutant."""

from pathlib import Path

import pytest

from tests.mutants import survivors
from tests.mutants.hunt import chosen
from tests.mutants.reach import Traced, point
from tests.mutants.sites import instrumented
from tests.mutants.switch import MUTANT, TRACE

SOURCE = '''
"""A module with every form of a site."""
from __future__ import annotations

LIMIT = 3

class Shelf:
    def put(self, n: Number) -> str:
        if n > LIMIT:
            raise ValueError("high")
        try:
            if n == 0:
                return "none"
            elif n < 0:
                raise KeyError(n)
            else:
                note = "put"
        except KeyError:
            raise
        if note:
            note += "!"
        return note

def skip(numbers):
    kept = []
    for n in numbers:
        if n % 2:
            continue
        kept.append(n)
    return kept
'''
GUARDS = [f"a.py:Shelf.put:guard:{n}" for n in (1, 2, 3)]
RAISES = [f"a.py:Shelf.put:raise:{n}" for n in (1, 2, 3)]
SKIP = "a.py:skip:guard:1"


def outcomes(source: str) -> list[object]:
    """Return what the module's functions do for values either side of every guard."""
    module: dict[str, object] = {}
    exec(compile(source, "a.py", "exec"), module)
    found: list[object] = []
    for n in (-1, 0, 1, 9):
        try:
            found.append(module["Shelf"]().put(n))
        except (KeyError, ValueError, UnboundLocalError) as error:
            found.append(type(error))
    return [*found, module["skip"]([1, 2, 3, 4])]


RIGHT = [KeyError, "none", "put!", ValueError, [2, 4]]


@pytest.mark.parametrize(
    ("mutant", "expected"),
    [
        (None, RIGHT),
        ("a.py:elsewhere:raise:1", RIGHT),
        (GUARDS[0], [ValueError, ValueError, ValueError, "put!", [2, 4]]),
        (GUARDS[1], ["none", "put!", "none", ValueError, [2, 4]]),
        (GUARDS[2], ["put!", "none", KeyError, ValueError, [2, 4]]),
        (RAISES[0], [KeyError, "none", "put!", "put!", [2, 4]]),
        (RAISES[1], [UnboundLocalError, "none", "put!", ValueError, [2, 4]]),
        (RAISES[2], [UnboundLocalError, "none", "put!", ValueError, [2, 4]]),
        (SKIP, [KeyError, "none", "put!", ValueError, [1, 3]]),
    ],
)
def test_a_mutant_is_one_site_gone_wrong(
    mutant: str | None, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutant:
        monkeypatch.setenv(MUTANT, mutant)
    assert outcomes(SOURCE) == RIGHT
    assert outcomes(instrumented("a.py", SOURCE)[0]) == expected


def test_the_trace_of_each_test_holds_each_site_that_it_reached_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path / "link"))
    for test in ("first", "second"):
        point(tmp_path / "link", tmp_path / test)
        outcomes(instrumented("a.py", SOURCE)[0])
        assert sorted((tmp_path / test).read_text().split()) == sorted([*GUARDS, *RAISES, SKIP])


@pytest.mark.parametrize(
    "line",
    ["gone:f:raise:1  equivalent: same", "s", "s  same", "s  equivalent: ", "s  whim: I like it",
     "s  slow: x\ns  slow: x"],
)  # fmt: skip
def test_a_survivor_without_a_site_or_a_reason_is_refused(line: str) -> None:
    assert survivors.read("# a comment\n\ns  slow: x\n", {"s"}) == {"s": "slow: x"}
    with pytest.raises(ValueError, match="no such site"):
        survivors.read(line, {"s"})


def test_the_quickest_tests_run_first_and_one_case_of_each_before_a_second() -> None:
    tests = [
        Traced(name, seconds, [])
        for name, seconds in (("b", 20.0), ("a[2]", 2.0), ("a[1]", 1.0), ("c", 90.0))
    ]
    assert [test.name for test in chosen(tests)] == ["a[1]", "b"]
    assert [test.name for test in chosen(tests[3:])] == ["c"]
