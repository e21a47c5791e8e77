"""Our connector without its checks, to measure what they cost. vLLM loads it by this module's name.

The checksums that are stored with each row are part of the file, and are taken.
"""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from connector import gather, shards
from connector.hidden_states import HiddenStatesConnector
from connector.repeats import RepeatCheck
from connector.rowcheck import Look, RowChecker
from connector.sentinels import Sentinels
from connector.sums import Sums
from schemas.dataset.manifest import LayerStats

__all__ = ["HiddenStatesConnector"]


def _nothing(*_: object) -> None:
    """In the place of a check."""


def _no_sums(words_TW: np.ndarray, out_T: Sums) -> None:
    """Read nothing of what is copied: the same sum for every state."""
    out_T[:] = 0


class NoChecks(RowChecker):
    """Reads nothing of a row."""

    def look(self, states_LTH: torch.Tensor) -> Look:
        """Take the layers' checksums, which are stored, and the same sum for every state."""
        nothing_LT = np.zeros(states_LTH.shape[:2], np.int64)
        raw_LB = states_LTH.flatten(1).view(torch.uint8).numpy()
        return Look(nothing_LT, nothing_LT.view(np.uint64), tuple(map(xxhash.xxh3_64_intdigest, raw_LB)))

    def check(self, states_LTH: torch.Tensor, layer_ids: Sequence[int], look: Look) -> tuple[LayerStats, ...]:
        """Look at no value."""
        return tuple(LayerStats(layer_id=one, mean_rms=0.0, max_abs=0.0) for one in layer_ids)


gather.add_up = _no_sums
Sentinels.place = _nothing  # type: ignore[method-assign,assignment]  # likewise
RepeatCheck.check = _nothing  # type: ignore[method-assign,assignment]  # likewise
shards.RowChecker = NoChecks  # type: ignore[misc]  # this module exists to put it there
