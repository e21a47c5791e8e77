"""Children that do not outlive their parent.

A worker without its service, or a planner without its worker, ends at once.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
ORPHANED = signal.SIGUSR2
"""Tells a worker that its parent is gone: it gives its units back at once. It may already be draining; and a
new service may already be starting an engine, and the GPU has no memory for two.
"""
FAULTS = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals that end a process when a library fails in it, mostly for lack of memory."""


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGTERM) -> None:
    """Ask the kernel to signal this process when its parent ends; call it first in the child. Linux only.

    `parent_pid` is the pid that the parent sees: if it is no longer our parent, the parent died before we
    asked.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(0)
