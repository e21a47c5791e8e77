"""Sums each state, to show whether its bytes have changed and which states are the same.

Legend: L captured layers, T tokens, H hidden size, W words of a state.
"""

import numpy as np
import torch
from numpy.typing import NDArray

Sums = NDArray[np.int64]
"""[L, T]: the words of each state added up, modulo 2^64. A changed bit always changes a sum."""


def word_type(row_bytes: int) -> torch.dtype:
    """Return the widest integer type whose size divides `row_bytes`, the size of a state."""
    widths = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return next(kind for width, kind in widths.items() if row_bytes % width == 0)


def words_of(states: torch.Tensor) -> NDArray[np.signedinteger]:
    """View states in host memory as the words that are summed: H values become W words, without a copy."""
    word = word_type(states.shape[-1] * states.element_size())
    return states.view(torch.uint8).numpy().view(str(word).removeprefix("torch."))


def add_up(words_TW: NDArray[np.signedinteger], out_T: Sums) -> None:
    """Write the sum of each token's words, of one layer or of several.

    It runs at memory speed; numpy is used for the reason given in `connector.rowcheck`.
    """
    words_TW.sum(axis=-1, dtype=np.int64, out=out_T)
