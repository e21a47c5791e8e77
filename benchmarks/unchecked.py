"""Our connector without its row checks, to measure what they cost. vLLM loads it by this module's name.

Only the checks are left out: the checksums that are stored with each row are part of the file.
"""

from collections.abc import Sequence

import numpy as np
import torch

from connector import gather, shards, writers
from connector.hidden_states import HiddenStatesConnector
from connector.rowcheck import LayerReading, RowChecker
from connector.seen import SeenStates
from connector.sums import Sums

__all__ = ["HiddenStatesConnector"]


class _NoChecks(RowChecker):
    """Reads nothing of a row."""

    def check(self, states_LTH: torch.Tensor, layer_ids: Sequence[int]) -> tuple[LayerReading, ...]:
        """Say nothing of the row."""
        return tuple(LayerReading(mean_rms=0.0, max_abs=0.0) for _ in layer_ids)


def _no_sums(states_LTH: torch.Tensor) -> Sums:
    """Read nothing of a row: the same sum for every state."""
    return np.zeros((1, 1), np.int64)


def _remember_nothing(
    self: SeenStates, sums: Sums, token_ids: Sequence[int], layer_ids: Sequence[int]
) -> None:
    """Say nothing of the row."""


gather.token_sums = writers.token_sums = _no_sums
SeenStates.check = _remember_nothing  # type: ignore[method-assign,assignment]  # likewise
shards.RowChecker = _NoChecks  # type: ignore[misc]  # this module exists to put it there
