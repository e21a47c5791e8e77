"""Runs the loaders of real trainers, each in a process of its own that alone sees their packages."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainers import TRAINERS


def loaded_by(script: str, *arguments: object, result: Path) -> Any:
    """Run a script with `arguments` and `result` in `sys.argv`; return what it saved there with torch."""
    assert TRAINERS.is_dir(), f"{TRAINERS} is missing: run 'make .cache/trainers/installed'"
    environment = os.environ | {"PYTHONPATH": str(TRAINERS), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments), str(result)],
        env=environment,
        cwd=result.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(result, weights_only=True)
