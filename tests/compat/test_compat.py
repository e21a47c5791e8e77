"""The judge of compatibility, on a package that is made up: what moved is named, and nothing else is."""

import ast
from pathlib import Path

import pytest

from tests.compat.judge import Report, judge
from tests.compat.source import Source

OLD = """
from abc import abstractmethod

class Base:
    LIMIT = 1
    def __init__(self, config): self.config = config
    def begin(self, request, count=0): ...

class Connector(Base):
    @abstractmethod
    def finish(self, request): ...

class Options:
    size: int = 1

def load(path, *, strict=False): ...

made = Options()
"""
INIT = """
TABLE = {"Options": ".core:Options"}
def __getattr__(name): ...
from .core import load as load
"""
OURS = """
import made
from made import Options as Lazy, load
from made.core import Base, Connector, Options, made as object_of_theirs

class Ours(Connector):
    def begin(self, request, count=0): return Base.LIMIT
    def finish(self, request): ...

load("x", strict=True)
made.load("x")
Options(size=2)
Lazy(size=3)
object_of_theirs.size
"""


def judged(root: Path, changes: dict[str, str], ours: str = OURS) -> Report:
    new = OLD
    for before, after in changes.items():
        assert before in new
        new = new.replace(before, after)
    for version, text in (("old", OLD), ("new", new)):
        package = root / version / "made"
        package.mkdir(parents=True)
        for name, content in {"__init__.py": INIT, "core.py": text}.items():
            (package / name).write_text(content)
    return judge("made", [ast.parse(ours)], Source(root / "old"), Source(root / "new"))


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (("LIMIT = 1", "LIMITS = 1"), "made.core:Base.LIMIT is gone"),
        (("def load", "def read"), "made:load is gone"),
        (("strict=False", "careful=False"), "made:load: it does not take ['strict']"),
        (("load(path, ", "load(path, kind, "), "made:load: it also needs ['kind']"),
        (("load(path, ", "load("), "made:load: it takes 0 positional arguments, not 1"),
        (("size: int", "length: int"), "made.core:Options: ['size'] are no fields"),
        (("size: int", "length: int"), "made:Options: ['size'] are no fields"),
        (("size: int", "length: int"), "made.core:made.size is gone"),
        (("def begin", "def start"), "Connector.begin, which Ours overrides, is gone"),
        (("request, count=0", "request, count=0, more=0"), "Connector.begin is now called with ['more']"),
        (
            ("class Options", "    @abstractmethod\n    def end(self): ...\nclass Options"),
            "end is new, and abstract",
        ),
    ],
)
def test_what_moved_is_named(tmp_path: Path, change: tuple[str, str], moved: str) -> None:
    report = judged(tmp_path, dict([change]))
    assert any(line.startswith(moved) or line.endswith(moved) for line in report.moved), report
    assert report.unclear == set()


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (("load(path, *, strict=False", "load(path, mode=None, *, strict=False, more=0"), set()),
        (("LIMIT = 1", "LIMIT = 2"), set()),
        (("class Options", "    def end(self): ...\nclass Options"), {"Connector.end is new"}),
    ],
)
def test_what_still_fits_has_not_moved(tmp_path: Path, change: tuple[str, str], changed: set[str]) -> None:
    report = judged(tmp_path, dict([change]))
    assert (report.moved, report.changed, report.unclear) == (set(), changed, set())
    assert report.as_before > 0


def test_a_name_that_the_installed_sources_do_not_tell_is_said(tmp_path: Path) -> None:
    assert judged(tmp_path, {}, "from made.core import nothing").unclear == {"made.core:nothing"}
