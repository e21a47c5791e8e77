"""A rank that trains on a job while it is captured: `python -m tests.crash.trainer URL JOB RANK OF LEDGER`.

What it took and the state behind it become durable together, as in a checkpoint: a line of the ledger a row.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from service.reader import Eagle3, QuarryFollower, QuarryStream
from tests.support.children import children_of

NUM_WORKERS = 2


class Stated(IterableDataset[Any]):
    """The rows of each loader worker, from where it was, each with the state behind it."""

    def __init__(self, rows: QuarryFollower, states: dict[int, dict[str, int]]) -> None:
        self._rows, self._states = rows, states

    def __iter__(self) -> Iterator[tuple[int, list[int], dict[str, int]]]:
        worker = get_worker_info().id
        if worker in self._states:
            self._rows.load_state_dict(self._states[worker])
        for view in self._rows:
            assert len(view["hidden_states"]) == len(view["target_hidden_states"])
            yield worker, view["input_ids"].tolist(), self._rows.state_dict()


def lines_of(ledger: Path) -> list[Any]:
    """Return what was taken, without a line that was cut by a kill."""
    text = ledger.read_text() if ledger.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def train(url: str, job_id: str, rank: str, world_size: str, ledger: str) -> None:
    file = Path(ledger)
    states = {worker: state for worker, _, state in lines_of(file)}
    whole = "".join(f"{json.dumps(line)}\n" for line in lines_of(file))
    file.write_text(whole)
    rows = QuarryStream.follow(url, job_id, Eagle3(), rank=int(rank), world_size=int(world_size))
    loader = DataLoader(Stated(rows, states), batch_size=None, num_workers=NUM_WORKERS)
    with file.open("a") as output:
        for line in loader:
            output.write(json.dumps(line) + "\n")
            output.flush()


class Trainer:
    """The process, which is started again when it has ended before its rows did."""

    def __init__(self, folder: Path, url: str, job_id: str, rank: int, world_size: int) -> None:
        self.ledger, self._log = folder / f"ledger{rank}", folder / f"log-trainer{rank}"
        of_job = [url, job_id, str(rank), str(world_size), str(self.ledger)]
        self._command = [sys.executable, "-m", "tests.crash.trainer", *of_job]
        self._process: subprocess.Popen[bytes] | None = None

    def ended(self) -> bool:
        """Start it if it died; return whether it took all of its rows."""
        code = None if self._process is None else self._process.poll()
        if code == 0:
            return True
        if self._process is None or code is not None:
            with self._log.open("ab") as output:
                self._process = subprocess.Popen(self._command, stdout=output, stderr=output)
        return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def kill_worker(self) -> None:
        """Kill one of its loader's workers, if there is one: torch then ends the process."""
        if self._process is not None and self._process.poll() is None:
            for pid in sorted(children_of(self._process.pid))[:1]:
                os.kill(pid, signal.SIGKILL)

    def taken(self) -> list[list[int]]:
        return [ids for _, ids, _ in lines_of(self.ledger)]


if __name__ == "__main__":
    train(*sys.argv[1:])
