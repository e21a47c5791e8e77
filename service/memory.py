"""How much memory this process may still take: what the host has, or less where a control group bounds it."""

from contextlib import suppress
from pathlib import Path

import psutil

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers of a line of the membership (none in version 2): the folder below the mount, the files
of limit and use, and the name in `memory.stat` of cached pages, which the kernel drops under pressure."""


def available_bytes(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Return the bytes that can still be taken: the least of the host and of every group above this process.

    `mount` is where the kernel shows the groups, `membership` the file that names this process's own.
    """
    least: float = psutil.virtual_memory().available
    with suppress(FileNotFoundError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _FILES:
                folder, *names = _FILES[controllers]
                root, own = mount / folder, mount / folder / path.lstrip("/")
                # In a container the path may be the host's, and the root is the container's own group.
                groups = [own, *own.parents]
                least = min([least, *(_left(group, *names) for group in groups[: groups.index(root) + 1])])
    return max(0, int(least))


def _left(group: Path, limit: str, used: str, cached: str) -> float:
    """Return what is left in a group; infinity where it has no limit, or is not there."""
    with suppress(OSError, ValueError):
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / used).read_text()) - int(statistics.get(cached, 0))
        return int((group / limit).read_text()) - taken
    return float("inf")
