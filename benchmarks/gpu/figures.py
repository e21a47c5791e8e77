"""Figures of parts in one JSON file, which is whole after every change: a run that is cut short keeps them.

Standard library alone.
"""

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Save = Callable[[str, object], None]
"""Keeps one figure of a part by its name, at once."""


class FigureFile:
    """A JSON object of facts, and below `parts` of what each part found.

    Processes write in turns: parts while they run, and who started them before and after.
    """

    def __init__(self, path: Path) -> None:
        """Read and write `path`; what an earlier command left there stays."""
        self._path = path

    def read(self) -> dict[str, Any]:
        """Return everything."""
        if not self._path.exists():
            return {}
        found: dict[str, Any] = json.loads(self._path.read_text())
        return found

    def put(self, value: object, *keys: str) -> None:
        """Set the value at `keys`; objects on the way are made."""
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            everything = self.read()
            place = everything
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = value
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(everything, indent=1) + "\n")
            partial.replace(self._path)
        finally:
            os.close(folder)

    def save(self, part: str) -> Save:
        """Return what keeps the figures of one part."""
        return lambda name, value: self.put(value, "parts", part, "figures", name)
