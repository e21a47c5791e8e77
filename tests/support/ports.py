"""Ports for processes that must be told which one to listen on before they listen."""

import os
import socket
from itertools import cycle

PARTS = range(20_000, 29_000, 1_000)
"""Where each part begins: below the ports that Linux gives to whoever asks for any, which are those from
32,768 on, and above those of Ray. Test processes that run side by side take theirs from different parts.
"""


def _starts() -> list[int]:
    """Return where this process tries first, then next: blocks of ten ports, all of its part."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    part = PARTS[int(number) % len(PARTS)]
    first = os.getpid() * 10 % 1_000  # else a run begins with the ports of the run before it
    return [part + (first + more) % 1_000 for more in range(0, 1_000, 10)]


_STARTS = cycle(_starts())


def free_port(following: int = 0) -> int:
    """Return a port of 127.0.0.1 that nobody listens on, nor on the `following` ones (at most 9)."""
    return next(
        start for start in _STARTS if all(_is_free(start + number) for number in range(following + 1))
    )


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
