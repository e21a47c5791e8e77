"""Our connector without its row checks, to measure what they cost. vLLM loads it by this module's name.

Only the checks are left out (`benchmarks.no_checks`).
"""

import numpy as np

from benchmarks.no_checks import NoChecks, refuse_nothing
from connector import gather, shards
from connector.hidden_states import HiddenStatesConnector
from connector.repeats import RepeatCheck
from connector.sentinels import Sentinels
from connector.sums import Sums

__all__ = ["HiddenStatesConnector"]


def _no_sums(words_TW: np.ndarray, out_T: Sums) -> None:
    """Read nothing of what is copied: the same sum for every state."""
    out_T[:] = 0


gather.add_up = _no_sums
Sentinels.place = refuse_nothing  # type: ignore[method-assign,assignment]  # likewise
RepeatCheck.check = refuse_nothing  # type: ignore[method-assign,assignment]  # likewise
shards.RowChecker = NoChecks  # type: ignore[misc]  # this module exists to put it there
