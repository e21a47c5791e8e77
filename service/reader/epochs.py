"""The epoch that a trainer sets, shared with the workers of its loader."""

from typing import Any

import torch


class SetEpoch:
    """The argument of the last `set_epoch`, in memory that a loader's workers share with its process.

    With `persistent_workers`, workers keep their copy of a dataset for all epochs, and no method call reaches
    it.
    """

    def __init__(self) -> None:
        self._told = torch.zeros(2, dtype=torch.int64)
        """How often an epoch was set, and the last epoch."""
        self._told.share_memory_()
        self._heard = 0

    def set(self, epoch: int) -> None:
        """Set the epoch for every copy of this object."""
        self._told[1] = epoch
        self._told[0] += 1

    def news(self) -> int | None:
        """Return the epoch if any process has set one since this copy was last asked."""
        times, epoch = self._told.tolist()
        is_new, self._heard = times != self._heard, times
        return epoch if is_new else None

    def forget(self) -> None:
        """Treat the last epoch that was set, if any, as new again."""
        self._heard = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        # An unpickled copy has memory of its own, which it shares with workers started from it.
        self.__dict__.update(state)
        self._told.share_memory_()
