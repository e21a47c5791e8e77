"""What the child is busy with, in memory that it shares with its parent: a frozen process cannot be asked."""

import mmap
import struct
from enum import IntEnum

PROGRESS = struct.Struct("<qq")


class Step(IntEnum):
    """Which of the untrusted things runs."""

    START = 0
    TOKENIZER = 1
    TEMPLATE = 2
    SOURCE = 3


class Progress:
    """A step and a row's position in shared memory; position -1 is before the first row."""

    def __init__(self, file: int) -> None:
        """Map the first bytes of `file`, which may be closed afterwards."""
        self._memory = mmap.mmap(file, PROGRESS.size)
        self._position = -1

    def row(self, step: Step, position: int) -> None:
        """Note that the child begins `step` of row `position`."""
        self._position = position
        self.step(step)

    def step(self, step: Step) -> None:
        """Note another step of the same row."""
        PROGRESS.pack_into(self._memory, 0, self._position, step)

    def read(self) -> tuple[int, int]:
        """Return the position and the step that the child noted last."""
        position, step = PROGRESS.unpack_from(self._memory)
        return position, step

    def close(self) -> None:
        """Unmap."""
        self._memory.close()
