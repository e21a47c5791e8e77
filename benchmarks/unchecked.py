"""Our connector without its row checks, to measure what they cost. vLLM loads it by this module's name.

Only the checks are left out (`benchmarks.no_checks`).
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.no_checks import NoChecks
from connector import gather, shards
from connector.hidden_states import HiddenStatesConnector
from connector.repeats import RepeatCheck
from connector.sentinels import Sentinels
from connector.sums import Sums

__all__ = ["HiddenStatesConnector"]


def _no_sums(words_TW: np.ndarray, out_T: Sums) -> None:
    """Read nothing of what is copied: the same sum for every state."""
    out_T[:] = 0


def _remember_nothing(
    self: RepeatCheck, sums: Sums, token_ids: Sequence[int], layer_ids: Sequence[int]
) -> None:
    """Say nothing of the row."""


def _place_nothing(self: Sentinels, block_ids: Sequence[int]) -> None:
    """Leave the slots of fresh blocks as they are."""


gather.add_up = _no_sums
Sentinels.place = _place_nothing  # type: ignore[method-assign]  # likewise
RepeatCheck.check = _remember_nothing  # type: ignore[method-assign,assignment]  # likewise
shards.RowChecker = NoChecks  # type: ignore[misc]  # this module exists to put it there
