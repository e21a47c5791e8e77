"""A sum for every state: tells whether bytes are the ones that they were, and which states are the same.

Legend: L captured layers, T tokens, H hidden size.
"""

import numpy as np
import torch
from numpy.typing import NDArray

Sums = NDArray[np.int64]
"""[L, T]: the words of each state added up, modulo 2^64. A changed bit always changes a sum."""


def word_type(row_bytes: int) -> torch.dtype:
    """Return the widest integer that a state of `row_bytes` is a whole number of."""
    widths = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return next(kind for width, kind in widths.items() if row_bytes % width == 0)


def token_sums(states_LTH: torch.Tensor) -> Sums:
    """Return the sums of states in host memory, whose H values lie side by side.

    One pass at the speed of memory, by numpy for the reason that `connector.rowcheck` gives.
    """
    word = word_type(states_LTH.shape[-1] * states_LTH.element_size())
    words = states_LTH.view(torch.uint8).numpy().view(str(word).removeprefix("torch."))
    sums: Sums = words.sum(axis=-1, dtype=np.int64)
    return sums
