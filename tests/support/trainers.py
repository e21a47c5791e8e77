"""Runs the loaders of real trainers, each in a process of its own that alone sees their packages."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainers import TRAINERS

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return the environment of a process that sees the trainers' packages beside ours."""
    assert TRAINERS.is_dir(), f"{TRAINERS} is missing: run 'make .cache/trainers/installed'"
    path = os.pathsep.join((str(TRAINERS), str(ROOT)))
    return {"HF_HUB_OFFLINE": "1"} | os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def loaded_by(script: str, *arguments: object, result: Path) -> Any:
    """Run a script with `arguments` and `result` in `sys.argv`; return what it saved there with torch."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments), str(result)],
        env=environment(),
        cwd=result.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(result, weights_only=True)
