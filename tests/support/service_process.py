"""`quarry serve` as an operator runs it: a process of its own, with the fake engine."""

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx2

ROOT = Path(__file__).parents[2]
LAST_WORDS_S = 30.0
"""How long the processes that it has started may hold its log open after it."""
QUARRY = [sys.executable, "-m", "service.cli"]
SAMPLES = [{"id": str(number), "token_ids": [1, 2, 3, number]} for number in range(8)]


def body_of(target: Path, **changes: Any) -> dict[str, Any]:
    """Return a job of a few samples."""
    source = {"kind": "inline", "samples": SAMPLES}
    return {"model": str(target), "layers": [1, 2], "canary": "skip", "source": source} | changes


@dataclass(frozen=True)
class Serving:
    """A running `quarry serve`."""

    process: subprocess.Popen[str]
    url: str
    worker: int | None

    def post(self, target: Path) -> str:
        """Submit a job of a few samples and return its id."""
        answer = httpx2.post(f"{self.url}/extract", json=body_of(target), trust_env=False, timeout=60)
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]


@contextmanager
def serving(
    data_dir: Path,
    *options: str,
    python_path: str = str(ROOT),
    on_line: Callable[[str], None] = lambda line: None,
    **settings: str,
) -> Iterator[Serving]:
    """Start it on a free port and wait until it is ready; kill it in the end if it still lives.

    `on_line` gets each line that it logs.
    """
    environment = os.environ | {
        "PYTHONPATH": python_path,
        "QUARRY_ENGINE": "tests.support.fake_engine:FakeEngine",
        "QUARRY_MODEL_ROOTS": '["/"]',
        "QUARRY_POLL_S": "0.05",
        **settings,
    }
    command = [*QUARRY, "serve", "--data-dir", str(data_dir), "--port", "0", *options]
    log = data_dir.with_suffix(".log")
    with log.open("w") as file:
        child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=file, text=True)
    lines: SimpleQueue[str] = SimpleQueue()
    last: deque[str] = deque(maxlen=30)

    def read() -> None:
        # All of it, since a pipe that nobody empties holds up whoever logs into it.
        assert child.stderr is not None
        with child.stderr as logged:
            for line in logged:
                on_line(line)
                last.append(line)
                lines.put(line)
        lines.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        seen, url, worker = "", None, None
        while url is None or (worker is None and "--no-worker" not in options):
            line = lines.get()
            assert line, seen
            seen += line
            url = url or re.search(r"Uvicorn running on (\S+)", line)
            worker = worker or re.search(r"worker (\d+) started", line)
        transport = httpx2.HTTPTransport(retries=20)
        with httpx2.Client(transport=transport, trust_env=False) as client:
            client.get(f"{url[1]}/readyz").raise_for_status()
        yield Serving(child, url[1], int(worker[1]) if worker else None)
    except BaseException as error:
        if child.poll() is not None:
            error.add_note(f"the service ended with code {child.returncode} and said:\n{''.join(last)}")
        raise
    finally:
        child.kill()
        child.wait()
        reader.join(LAST_WORDS_S)
