"""Where the trainers' own packages lie, which `make test` installs apart from ours. Pure."""

from pathlib import Path

TRAINERS = Path(__file__).resolve().parent.parent / ".cache" / "trainers"
"""Made by `make` from requirements/trainers.txt."""


def has_speculators() -> bool:
    """Say whether speculators is installed there."""
    return (TRAINERS / "speculators").is_dir()
