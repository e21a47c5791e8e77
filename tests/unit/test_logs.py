"""A JSON log line is one object, whatever is logged or written, and says which task was worked on."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from service.errors import LeaseLost, WriteFailed
from service.logs import JsonFormatter, VisibleFormatter
from service.work.runner import attempt

logger = logging.getLogger("tests.logs")
ROOT = Path(__file__).parents[2]


class Lines(io.StringIO):
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def lines() -> Iterator[Lines]:
    written = Lines()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.mark.parametrize("name", ["\x1b[2J\u202e\x9b1A", "a\nb\r\u2028c", '{"level": "ERROR"}', "\ud800\x00"])
def test_a_name_ends_no_line_and_is_kept(name: str) -> None:
    record = logger.makeRecord("tests.logs", logging.WARNING, "file", 1, "job %s", (name,), None)
    text = JsonFormatter().format(record)
    assert text.isascii() and text.isprintable()
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "tests.logs", f"job {name}")
    assert line.keys() == {"time", "level", "logger", "message", "host", "pid"}


def test_a_name_or_an_error_begins_no_line_of_a_log_for_people() -> None:
    """Only a record begins at the margin: an error's text may be from a dataset's card."""
    forged = "x\n2026-11-28 03:00:00,000 WARNING service.store: forged\r\n\u2028\x852026"
    error = ValueError(forged)
    info = (ValueError, error, None)
    record = logger.makeRecord("tests.logs", logging.WARNING, "file", 1, "the plan: %s", (forged,), info)
    first, *others = VisibleFormatter("%(levelname)s: %(message)s").format(record).splitlines()
    assert first == "WARNING: the plan: x"
    assert len(others) > 2 and all(line.startswith("    ") for line in others)


def test_lines_of_an_attempt_name_its_task_also_those_of_its_threads_and_of_its_error(lines: Lines) -> None:
    async def work(unit: int) -> None:
        with attempt("the unit", job="j", unit=unit, epoch=1):
            await asyncio.sleep(0)
            await asyncio.to_thread(logger.info, "beside")
            raise WriteFailed("no space")
        logger.info("behind")

    async def both() -> None:
        await asyncio.gather(work(1), work(2))

    asyncio.run(both())
    elsewhere = threading.Thread(target=logger.info, args=("elsewhere",))
    elsewhere.start()
    elsewhere.join()
    named = sorted((line["message"], line.get("unit", 0)) for line in lines.objects())
    beside, behind = [("beside", 1), ("beside", 2)], [("behind", 0)] * 2
    assert named == [*behind, *beside, ("elsewhere", 0), ("the unit: no space", 1), ("the unit: no space", 2)]
    assert all(line["job"] == "j" and line["epoch"] == 1 for line in lines.objects() if line.get("unit"))


def test_a_traceback_is_in_its_line(lines: Lines) -> None:
    with attempt("the plan"):
        raise ZeroDivisionError("a bug")
    with attempt("the plan"):
        raise LeaseLost("gone")
    bug, lost = lines.objects()
    assert bug["exception"].endswith("ZeroDivisionError: a bug") and "exception" not in lost


def test_where_a_line_was_logged_is_in_it_if_that_is_asked_for(lines: Lines) -> None:
    logger.info("here", stack_info=True)
    (line,) = lines.objects()
    assert line["message"] == "here" and "test_where_a_line_was_logged" in line["stack"]


def written(*command: str, code: int, **settings: str) -> Sequence[dict[str, Any]]:
    """Run Python with JSON lines; return what it writes to stderr, each line an object."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QUARRY_LOG_FORMAT": "json"} | settings
    ran = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == code, ran.stderr
    assert ran.stderr.isascii()
    return [json.loads(line) for line in ran.stderr.splitlines()]


PAST_THE_LOGGERS = """
import sys, threading, warnings
from service.logs import log_to_stderr

def broken():
    print("a child", file=sys.stderr)
    raise ZeroDivisionError("in a thread")

def main():
    log_to_stderr("json")
    warnings.warn("old \u202e", stacklevel=1)
    print("one\\rtwo\\n\\nthree", end="", file=sys.stderr, flush=True)
    thread = threading.Thread(target=broken)
    thread.start()
    thread.join()
    ended = threading.Thread(target=sys.exit)
    ended.start()
    ended.join()
    raise KeyError("at the end")

if __name__ == "__main__":
    main()
"""


def test_a_process_of_its_own_that_breaks_says_so_in_json() -> None:
    script = "from service import apart, logs; logs.log_to_stderr(); "
    script += "apart.call(int, 'no number', memory_bytes=2**30, deadline_s=60)"
    lines = written("-c", script, code=1)
    assert "ValueError: invalid literal" in "".join(line["message"] for line in lines)


def test_what_is_written_past_the_loggers_is_json_too(tmp_path: Path) -> None:
    """A warning, lines of a library, an error that ends a thread, and the one that ends the process."""
    script = tmp_path / "script.py"
    script.write_text(PAST_THE_LOGGERS)
    warning, *printed, thread, end = written(str(script), code=1)
    assert (warning["level"], warning["logger"]) == ("WARNING", "py.warnings")
    assert "UserWarning: old \u202e" in warning["message"]
    assert [line["message"] for line in printed] == ["one", "two", "three", "a child"]
    assert {(line["level"], line["logger"]) for line in printed} == {("ERROR", "stderr")}
    assert thread["exception"].endswith("ZeroDivisionError: in a thread")
    assert end["level"] == "CRITICAL" and end["exception"].endswith("KeyError: 'at the end'")


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"QUARRY_PORT": "none"}, "fix the option or QUARRY_PORT"),
        (
            {"QUARRY_ROLES": "not JSON"},
            """lists and objects in QUARRY_ variables are JSON, such as '["/data"]'""",
        ),
        (
            {"QUARRY_DATABASE_URL": "nowhere://"},
            "use sqlite:////path/quarry.db or postgresql+psycopg://user@host/name",
        ),
    ],
)
def test_a_setting_that_is_refused_at_start_is_refused_in_json(
    tmp_path: Path, settings: dict[str, str], cure: str
) -> None:
    """Also one that is refused only by what the worker makes of it."""
    command = ("-m", "service.cli", "worker", "--data-dir", str(tmp_path))
    said = written(*command, code=2, **settings)
    first, *_, last = (line["message"] for line in said)
    assert first.startswith("error: ") and last == f"  cure:  {cure}"


CHILD = """
from service.plan.child.fork_server import FORK_SERVER
from service.plan.child.task import Limits

talk, life, _ = FORK_SERVER.start_child()
talk.send((5, Limits(memory_bytes=2**28, row_cpu_s=0.0, silence_s=60.0)))
assert b"crash" in talk.recv_bytes()
assert life.recv_bytes() == b"1"
"""


@pytest.mark.slow
def test_a_child_of_the_planner_that_breaks_says_so_in_json(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    first, *_ = written(str(script), code=0)
    assert first["logger"] == "service.plan.child.main"
    assert "AttributeError: 'int' object has no attribute" in first["exception"]
