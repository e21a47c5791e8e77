"""How much memory this process may still take: what the host has free, or less if a cgroup limits it."""

from contextlib import suppress
from pathlib import Path

import psutil

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_FILES = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers in a line of the membership (empty in cgroup v2): the folder under the mount, the files
of limit and usage, and the field of `memory.stat` for cached pages, which the kernel drops under pressure.
"""


def available_bytes(mount: Path = _MOUNT, membership: Path = _MEMBERSHIP) -> int:
    """Return the bytes still available: the minimum over the host and every cgroup containing this process.

    `mount` is where cgroups are mounted, `membership` the file that names this process's cgroup.
    """
    least: float = psutil.virtual_memory().available
    with suppress(FileNotFoundError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in _FILES:
                folder, *names = _FILES[controllers]
                root, own = mount / folder, mount / folder / path.lstrip("/")
                # In a container the path may be the host's, while the root is the container's own cgroup.
                groups = [own, *own.parents]
                least = min([least, *(_left(group, *names) for group in groups[: groups.index(root) + 1])])
    return max(0, int(least))


def _left(group: Path, limit: str, used: str, cached: str) -> float:
    """Return the bytes left in a cgroup; infinity if it has no limit or does not exist."""
    with suppress(OSError, ValueError):
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / used).read_text()) - int(statistics.get(cached, 0))
        return int((group / limit).read_text()) - taken
    return float("inf")
