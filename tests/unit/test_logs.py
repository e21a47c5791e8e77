"""A JSON log line is one object, whatever is logged, and says which task was worked on."""

import asyncio
import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from service.errors import LeaseLost, WriteFailed
from service.logs import JsonFormatter
from service.work.runner import attempt

logger = logging.getLogger("tests.logs")


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
