"""Our connector without its row checks, to measure what they cost. vLLM loads it by this module's name.

Only the checks are left out: the checksums that are stored with each row are part of the file.
"""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from connector import gather, shards
from connector.hidden_states import HiddenStatesConnector
from connector.rowcheck import LayerReading, Look, RowChecker
from connector.seen import SeenStates
from connector.sums import Sums

__all__ = ["HiddenStatesConnector"]


class _NoChecks(RowChecker):
    """Reads nothing of a row."""

    def look(self, states_LTH: torch.Tensor) -> Look:
        """Take the layers' checksums, which are stored, and the same sum for every state."""
        nothing_LT = np.zeros(states_LTH.shape[:2], np.int64)
        raw_LB = states_LTH.flatten(1).view(torch.uint8).numpy()
        return Look(nothing_LT, nothing_LT.view(np.uint64), tuple(map(xxhash.xxh3_64_intdigest, raw_LB)))

    def check(
        self, states_LTH: torch.Tensor, layer_ids: Sequence[int], look: Look | None = None
    ) -> tuple[LayerReading, ...]:
        """Say nothing of the row."""
        return tuple(LayerReading(mean_rms=0.0, max_abs=0.0) for _ in layer_ids)


def _no_sums(words_TW: np.ndarray, out_T: Sums) -> None:
    """Read nothing of what is copied: the same sum for every state."""
    out_T[:] = 0


def _remember_nothing(
    self: SeenStates, sums: Sums, token_ids: Sequence[int], layer_ids: Sequence[int]
) -> None:
    """Say nothing of the row."""


gather.add_up = _no_sums
SeenStates.check = _remember_nothing  # type: ignore[method-assign,assignment]  # likewise
shards.RowChecker = _NoChecks  # type: ignore[misc]  # this module exists to put it there
