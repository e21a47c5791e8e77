"""Children that do not outlive their parent.

A worker without its service, or a planner without its worker, ends at once.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
FAULTS = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""What ends a process in which a library fails, most of all for lack of memory."""


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent does; call it first thing in the child. Linux only.

    `parent_pid` is the parent as it knows itself: if that is no longer our parent, it died before we asked.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(0)
