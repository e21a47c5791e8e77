"""Stages in processes of their own, each kept under a name made of all that decides it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trainers import TRAINERS
from connector.plugin import CAPTURES

ROOT = Path(__file__).resolve().parents[2]
LOG_TAIL_LINES = 25
LOG = "log.txt"

# One thread each, for two run side by side: more would wait for each other on models this small.
VLLM_ENVIRONMENT = {
    CAPTURES: "1",  # a CPU with tiles needs what the plug-in does
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
TRAINER_ENVIRONMENT = {
    "PYTHONPATH": f"{TRAINERS}:{ROOT}",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
QUARRY_ENVIRONMENT = {
    "QUARRY_ENGINE_OPTIONS": json.dumps({"enforce_eager": True, "max_num_seqs": 64}),
    "QUARRY_CPU_KV_CACHE_GIB": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


class LoopFailed(RuntimeError):
    """A stage ended badly; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Folders of finished stages. One that is half made never has the name of a finished one."""

    folder: Path

    def stage(self, name: str, decides: Mapping[str, object], make: Callable[[Path], None]) -> Path:
        """Return the folder that `make` fills, made if it is missing.

        `decides` is JSON: the values and the folders' names of earlier stages that its content depends on.
        """
        digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]
        done = self.folder / f"{name}-{digest}"
        if done.is_dir():
            return done
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self.folder))
        say(f"{name} ...")
        begun = time.monotonic()
        try:
            make(draft)
            draft.rename(done)
        except LoopFailed:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        say(f"{name}: {time.monotonic() - begun:.0f} s")
        return done


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, flush=True)


def run(arguments: Sequence[str | Path], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a command to its end, what it says going to `log`. Raises LoopFailed."""
    with log.open("ab") as sink:
        done = subprocess.run(
            [str(argument) for argument in arguments],
            env=os.environ | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            check=False,
        )
    if done.returncode:
        raise failed(" ".join(map(str, arguments[:4])), done.returncode, log)


def python(module: str, *arguments: str | Path) -> list[str | Path]:
    """Return the command that runs a module with this interpreter, its warnings left out of the log."""
    return [sys.executable, "-W", "ignore", "-m", module, *arguments]


def failed(what: str, code: int | None, log: Path) -> LoopFailed:
    """Return the error of a process that ended with `code`."""
    with log.open(errors="replace") as lines:
        tail = "".join(deque(lines, LOG_TAIL_LINES))
    return LoopFailed(f"{what} ended with {code}. The end of its log:\n{tail}")
