"""Writes checkpoints atomically."""

import shutil
from contextlib import suppress
from pathlib import Path

from schemas.dataset.seal import fsync

STAGED, EARLIER = "staged", "earlier"
"""Folders next to the checkpoints: for a checkpoint being written, and for the previous one while it is
replaced.
"""


def put_in_place(staged: Path, final: Path) -> None:
    """Replace `final` by a checkpoint that was written next to it; safe against power loss."""
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
    """Restore the previous checkpoint if a process was killed while it was being replaced.

    Every rank calls it before training begins.
    """
    if not (folder / "0").exists():
        with suppress(FileNotFoundError):  # there is none, or another rank was first
            (folder / EARLIER).rename(folder / "0")
    shutil.rmtree(folder / STAGED, ignore_errors=True)
