"""Machines on one network, all on this one: each has a network, processes and a root folder of its own."""

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.children import children_of

PROGRAMS = ("ip", "mount", "unshare")
BOOT = """
set -e
own=$1 shared=$2 root=$3
echo "$4" >/proc/sys/kernel/hostname
shift 4
mkdir -p "$own/$shared"
mount --bind "$root/$shared" "$own/$shared"
mount -o remount,bind,ro "$own/$shared"
mount --rbind "$own" "$root"
cd "$root"
exec "$@"
"""
"""Of a machine's first process: of the test's folder it sees its own part and what is shared, at one path."""


def missing() -> str | None:
    """Return why there can be no such network here, or none."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if absent := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(absent)} (iproute2, util-linux)"
    probe = ["unshare", "--net", "ip", "link", "add", "probe", "type", "veth", "peer", "name", "other"]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Machine:
    """A namespace on the network's bridge, and at most one command in it with all that this starts."""

    def __init__(self, name: str, namespace: str, root: Path, shared: str) -> None:
        """`shared` is the folder in `root` that it reads; `own` becomes its `root`."""
        self.name, self.own = name, root / f"on-{name}"
        self._namespace, self._root, self._shared = namespace, root, shared
        self._running: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Run a command; what it prints is appended to `log`."""
        self.own.mkdir(exist_ok=True)
        apart = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        boot = ["sh", "-c", BOOT, "boot", str(self.own), self._shared, str(self._root), self.name]
        whole = ["ip", "netns", "exec", self._namespace, *apart, *boot, *command]
        with log.open("ab") as output:
            self._running = subprocess.Popen(whole, env=environment, stdout=output, stderr=output)

    def end(self, number: int) -> int:
        """Signal the command, and wait until its last process is gone; return its exit code."""
        assert self._running is not None
        for first in children_of(self._running.pid):
            os.kill(first, number)
        return self._running.wait(120)

    @property
    def is_running(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def cut(self) -> None:
        """Let every packet vanish from now on, without a word to either side."""
        _ip("link", "set", self._namespace, "down")

    def restore(self) -> None:
        _ip("link", "set", self._namespace, "up")

    def lose(self) -> None:
        """Cut its network, kill everything on it, and remove its folder."""
        self.cut()
        self.end(signal.SIGKILL)
        shutil.rmtree(self.own)


class Network:
    """A bridge. This process is on it as well, at `address`."""

    def __init__(self, root: Path, shared: str) -> None:
        """Machines see their own part of `root`, and its folder `shared`."""
        self._root, self._shared, self._opened = root, shared, ExitStack()
        # Others may run at the same time: names and addresses are drawn.
        self._name = f"q{secrets.token_hex(3)}"
        self._prefix = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.address, self.range, self._used = f"{self._prefix}.1", f"{self._prefix}.0/24", 1

    @contextmanager
    def up(self) -> Iterator[None]:
        """Make the bridge; in the end machines and bridge are gone."""
        with self._opened:
            _ip("link", "add", self._name, "type", "bridge")
            self._opened.callback(_ip, "link", "del", self._name)
            _ip("addr", "add", f"{self.address}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            yield

    def machine(self, name: str) -> Machine:
        """Add a machine, which ends with the network."""
        self._used += 1
        port = f"{self._name}-{self._used}"
        _ip("netns", "add", port)
        self._opened.callback(_ip, "netns", "del", port)
        _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", port)
        self._opened.callback(_ip, "link", "del", port)
        _ip("link", "set", port, "master", self._name)
        _ip("link", "set", port, "up")
        _ip("-n", port, "addr", "add", f"{self._prefix}.{self._used}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", port, "link", "set", device, "up")
        made = Machine(name, port, self._root, self._shared)
        self._opened.callback(lambda: made.is_running and made.end(signal.SIGKILL))
        return made


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
