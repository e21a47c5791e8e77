"""Checkpoints that are there whole or not at all."""

import shutil
from pathlib import Path

from schemas.dataset.seal import fsync

STAGED, EARLIER = "staged", "earlier"
"""Beside the checkpoints: one that is written, and the one before while that takes its place."""


def put_in_place(staged: Path, final: Path) -> None:
    """Let a checkpoint that was written beside `final` take its place, whatever the power does."""
    for path in (*staged.rglob("*"), staged):
        fsync(path)
    earlier = final.parent / EARLIER
    shutil.rmtree(earlier, ignore_errors=True)
    if final.exists():
        final.rename(earlier)
    staged.rename(final)
    fsync(final.parent)
    shutil.rmtree(earlier, ignore_errors=True)
    shutil.rmtree(staged.parent)


def put_back(folder: Path) -> None:
    """Put the last whole checkpoint back where a process was killed while another took its place."""
    if (folder / EARLIER).exists() and not (folder / "0").exists():
        (folder / EARLIER).rename(folder / "0")
    shutil.rmtree(folder / STAGED, ignore_errors=True)
