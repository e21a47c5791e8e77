"""The drain's threads as the kernel sees them: the cores that they may run on, and their names.

On a CPU, vLLM binds the thread that runs the model to one core before it builds the connector, and a thread
inherits the binding of the one that starts it: every writer would share the model's core and leave the others
idle. On a GPU nothing is bound, and that changes nothing.
"""

import ctypes
import os
import threading

_PR_SET_NAME = 15
_NAME_BYTES = 15
"""What the kernel keeps of a thread's name."""


def settle() -> None:
    """Let the calling thread run on every core that this process was started with, which are its parent's.

    Tell the kernel the thread's name, so that `top -H` and profilers say who works.
    """
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    name = threading.current_thread().name.encode()[:_NAME_BYTES]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
