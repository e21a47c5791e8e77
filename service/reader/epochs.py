"""The epoch that a trainer sets, known in the workers of its loader too."""

from typing import Any

import torch


class SetEpoch:
    """What `set_epoch` was given last, in memory that the workers of a loader share with its process.

    With `persistent_workers` they keep their copy of a dataset over all epochs, which no call reaches.
    """

    def __init__(self) -> None:
        """Nothing was set yet."""
        self._told = torch.zeros(2, dtype=torch.int64)
        """How often an epoch was set, and the last one."""
        self._told.share_memory_()  # type: ignore[no-untyped-call]
        self._heard = 0

    def set(self, epoch: int) -> None:
        """Let every copy of this object know."""
        self._told[1] = epoch
        self._told[0] += 1

    def news(self) -> int | None:
        """Return the epoch if one was set since this copy was asked last, by any process."""
        times, epoch = self._told.tolist()
        is_new, self._heard = times != self._heard, times
        return epoch if is_new else None

    def forget(self) -> None:
        """Take what was set last, if anything was, for news again."""
        self._heard = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The memory of a copy is its own, and shared with the workers that are started of it.
        self.__dict__.update(state)
        self._told.share_memory_()  # type: ignore[no-untyped-call]
