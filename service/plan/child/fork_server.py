"""A process that imports the tokenizer library once and forks children that plan, estimate and check.

The import takes seconds, a fork milliseconds. Between the server and each child is a keeper, which runs only
our code: it kills the child when the parent hangs up, and reports how it ended. All of them end with the
server, and the server ends with its owner.
"""

import atexit
import gc
import importlib
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait

from service.lifeline import die_with_parent
from service.logs import log_to_stderr
from service.plan.child.task import PROGRESS

IMPORTED = ("pyarrow.parquet", "transformers.models.auto.tokenization_auto", "service.plan.child.main")
"""Imports that every child needs."""
KEPT_NAMES = frozenset({
    "PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "XDG_CACHE_HOME",
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "all_proxy", "no_proxy",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "QUARRY_LOG_FORMAT",
})  # fmt: skip
KEPT_PREFIXES = ("LC_", "HF_", "COVERAGE_")
SECRET = "TOKEN"  # noqa: S105 - a part of names
ADDED = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "USE_TORCH": "0",
}
"""One thread, and no allocator that reserves more address space than it uses, since address space is
limited. A model's config may name another repository, which transformers would ask the Hub for with the token
of `hf auth login`; sources are read with the token that they are given.
"""
FORK = get_context("fork")
MESSAGE_S = 60
"""Time within which the rest of a started message must arrive."""


class ForkServer:
    """The parent's handle of one server, which starts with the first child. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket

    def start_child(self) -> tuple[Connection, Connection, mmap.mmap]:
        """Start a child, which then waits for its task. Raises OSError.

        Returns the connection to the child; the connection on which its keeper reports how it ended, and
        whose closing kills the child; and the shared memory for the child's progress.
        """
        ours, talk_theirs = socket.socketpair()
        # An incomplete message must not block the parent.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_S, 0))
        talk = Connection(ours.detach())
        life, life_theirs = Pipe()
        memory = os.memfd_create("quarry-progress")
        os.ftruncate(memory, PROGRESS.size)
        progress = mmap.mmap(memory, PROGRESS.size)
        with talk_theirs, life_theirs, os.fdopen(memory), self._lock:
            self._start()
            socket.send_fds(self._control, [b"."], [talk_theirs.fileno(), life_theirs.fileno(), memory])
        return talk, life, progress

    def warm(self) -> None:
        """Start the server now, so that the first child need not wait for the imports."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the server and thus its children."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - the command is our own
                [sys.executable, "-m", "service.plan.child.fork_server", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )


def _environment() -> dict[str, str]:
    """Return this process's environment without secrets and without our settings, except the log format."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if (name in KEPT_NAMES or name.startswith(KEPT_PREFIXES)) and SECRET not in name
    }
    return kept | ADDED


FORK_SERVER = ForkServer()
"""This process's server."""
atexit.register(FORK_SERVER.close)


def serve(control: socket.socket) -> None:
    """Fork a keeper for each message from the owner, until the owner ends. Must run in the only thread."""
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, 3)
        if not message:
            os._exit(0)  # the kernel ends the keepers
        FORK.Process(target=_keep, args=(control, os.getpid(), *files)).start()
        for file in files:
            os.close(file)


def _keep(control: socket.socket, server_pid: int, talk: int, life: int, memory: int) -> None:
    """Fork a child; kill it if the parent hangs up; report its exit status."""
    die_with_parent(server_pid)
    control.close()
    child = FORK.Process(target=_live, args=(os.getpid(), talk, life, memory))
    child.start()
    os.close(talk)
    parent = Connection(life)
    wait([parent, child.sentinel])  # the parent only ever hangs up
    child.kill()
    child.join()
    with suppress(BrokenPipeError):
        parent.send_bytes(str(child.exitcode).encode())


def _live(keeper_pid: int, talk: int, life: int, memory: int) -> None:
    die_with_parent(keeper_pid)
    os.close(life)
    from service.plan.child.main import run

    run(Connection(talk), mmap.mmap(memory, PROGRESS.size))


def main() -> None:
    """Import, then serve the owner over the socket whose file descriptor is the first argument."""
    log_to_stderr()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The owner decides; Ctrl-C in a terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Tokenizers do not need torch, and importing it takes seconds and 300 MB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    for name in IMPORTED:
        importlib.import_module(name)
    del sys.modules["torch"]
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
