"""A process that has imported the tokenizer's library once, and forks a child for each plan and estimate.

The import takes seconds, a fork milliseconds. The server runs our code alone, so it always answers: it kills
a child whose parent hangs up, and its children die with it.
"""

import atexit
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from service.lifeline import die_with_parent
from service.plan.child.progress import PROGRESS, Progress

IMPORTED = ("pyarrow.parquet", "transformers.models.auto.tokenization_auto", "service.plan.child.main")
"""What every child needs."""
KEPT_NAMES = frozenset({
    "PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "XDG_CACHE_HOME",
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
})  # fmt: skip
KEPT_PREFIXES = ("LC_", "HF_", "COVERAGE_")
SECRET = "TOKEN"  # noqa: S105 - a part of names
ADDED = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "USE_TORCH": "0",
}
"""One thread, and no allocator that reserves address space beyond what it uses: that is limited."""


@dataclass(frozen=True, slots=True)
class ChildEnds:
    """The parent's ends: to talk over, to read the exit status from, and the child's progress.

    Closing `connection` kills the child.
    """

    connection: socket.socket
    status: int
    progress: Progress

    def close(self) -> None:
        """Kill the child if it lives."""
        self.connection.close()
        os.close(self.status)
        self.progress.close()


class ForkServer:
    """The parent's handle of one server, which starts with the first child. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def start_child(self) -> ChildEnds:
        """Return the ends of a new child, which waits for its task. Raises OSError."""
        ours, theirs = socket.socketpair()
        status, status_theirs = os.pipe()
        memory = os.memfd_create("quarry-progress")
        try:
            os.ftruncate(memory, PROGRESS.size)
            self._send([theirs.fileno(), status_theirs, memory])
            return ChildEnds(ours, status, Progress(memory))
        except OSError:
            ours.close()
            os.close(status)
            raise
        finally:
            theirs.close()
            os.close(status_theirs)
            os.close(memory)

    def warm(self) -> None:
        """Start the server now, so that the first child does not wait for its imports."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the server, and so its children."""
        with self._lock:
            self._end()

    def _send(self, files: list[int]) -> None:
        with self._lock:
            try:
                socket.send_fds(self._started(), [b"."], files)
            except BrokenPipeError:  # it has just died
                self._end()
                socket.send_fds(self._started(), [b"."], files)

    def _started(self) -> socket.socket:
        """Return the socket to a server that runs."""
        if self._server is not None and self._server[0].poll() is None:
            return self._server[1]
        self._end()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - the command is our own
                [sys.executable, "-m", "service.plan.child.fork_server", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )
        self._server = process, control
        return control

    def _end(self) -> None:
        if self._server is not None:
            process, control = self._server
            control.close()
            process.kill()
            process.wait()
        self._server = None


def _environment() -> dict[str, str]:
    """Return this process's environment without its secrets and our settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if (name in KEPT_NAMES or name.startswith(KEPT_PREFIXES)) and SECRET not in name
    }
    return kept | ADDED


FORK_SERVER = ForkServer()
"""That of this process."""
atexit.register(FORK_SERVER.close)


@dataclass(frozen=True, slots=True)
class _Forked:
    """A child as its server holds it: `files` are its connection, the pipe for its status, and its pidfd."""

    pid: int
    files: tuple[int, int, int]


def serve(control: socket.socket) -> None:
    """Fork a child for each message of the owner, until the owner ends. Must run in the only thread."""
    children: dict[int, _Forked] = {}
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        for file, _ in poller.poll():
            if file == control.fileno():
                message, files, _, _ = socket.recv_fds(control, 1, 3)
                if not message:
                    return
                child = _fork(control, children, *files)
                connection, _, pidfd = child.files
                children |= {connection: child, pidfd: child}
                poller.register(connection, 0)  # hang-ups alone
                poller.register(pidfd, select.POLLIN)
            elif file in children:
                _end_child(children, poller, children[file], hung_up=file == children[file].files[0])


def _fork(
    control: socket.socket, children: dict[int, _Forked], connection: int, status: int, memory: int
) -> _Forked:
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(server_pid)
            control.close()
            for file in {file for child in children.values() for file in child.files} | {status}:
                os.close(file)
            from service.plan.child.main import run

            run(socket.socket(fileno=connection), Progress(memory))
            code = 0
        finally:
            os._exit(code)
    os.close(memory)
    return _Forked(pid, (connection, status, os.pidfd_open(pid)))


def _end_child(children: dict[int, _Forked], poller: "select.poll", child: _Forked, *, hung_up: bool) -> None:
    """Reap a child that ended, or whose parent hung up, and tell its exit status to whoever still listens."""
    connection, status, pidfd = child.files
    if hung_up:
        os.kill(child.pid, signal.SIGKILL)
    _, ending = os.waitpid(child.pid, 0)
    with suppress(BrokenPipeError):
        os.write(status, str(os.waitstatus_to_exitcode(ending)).encode())
    for file in (connection, pidfd):
        poller.unregister(file)
        del children[file]
    for file in child.files:
        os.close(file)


def main() -> None:
    """Import, then serve the owner at the other end of the socket that the first argument numbers."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The owner decides; a terminal's Ctrl-C reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Tokenizers do not need it, and its import takes seconds and 300 MB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    for name in IMPORTED:
        importlib.import_module(name)
    del sys.modules["torch"]
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
