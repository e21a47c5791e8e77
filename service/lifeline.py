"""Children that do not outlive their parent.

A worker without its service, or a planner without its worker, ends at once.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
ORPHANED = signal.SIGUSR2
"""What a worker gets when its parent is gone: it waits for nothing, and gives its units back. It may already
drain; and a new service may already start an engine, for which the GPU has no second memory."""
FAULTS = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""What ends a process in which a library fails, most of all for lack of memory."""


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends; call it first in the child. Linux only.

    `parent_pid` is the parent as it knows itself: if that is no longer our parent, it died before we asked.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(0)
