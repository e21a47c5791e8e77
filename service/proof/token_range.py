"""Each token's smallest and largest value, several times faster than torch finds them in 16 bits.

With the bits below the sign turned over in negative numbers, floats of any width are ordered like signed
integers, which numpy compares a register at a time. NaN lies beyond infinity on either side, so it is carried
through.

Legend: T tokens, H hidden size.
"""

import numpy as np
import torch
from numpy.typing import NDArray

_KINDS = {torch.bfloat16: np.int16, torch.float16: np.int16, torch.float32: np.int32}
_ELEMENTS = 65_536
"""Taken at once: they stay in the core's own cache."""


def token_range(states_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value [T] of every token, in the dtype of `states_TH`.

    NaN is returned as one of them, or as both. Of zeros of both signs, -0 is the smaller.
    """
    kind = np.dtype(_KINDS[states_TH.dtype])
    bits_TH = states_TH.contiguous().view(torch.uint8).numpy().view(kind)
    num_tokens, hidden_size = bits_TH.shape
    low_T, high_T = np.empty(num_tokens, kind), np.empty(num_tokens, kind)
    step = max(1, _ELEMENTS // hidden_size)
    scratch_TH = np.empty((step, hidden_size), kind)
    for begin in range(0, num_tokens, step):
        part_TH = bits_TH[begin : begin + step]
        ordered_TH = _turned(part_TH, scratch_TH[: len(part_TH)])
        ordered_TH.min(axis=1, out=low_T[begin : begin + step])
        ordered_TH.max(axis=1, out=high_T[begin : begin + step])
    low, high = (torch.from_numpy(_turned(one_T, np.empty_like(one_T))) for one_T in (low_T, high_T))
    return low.view(states_TH.dtype), high.view(states_TH.dtype)


def _turned(bits: NDArray[np.signedinteger], out: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Turn the bits below the sign over where the sign is set; twice gives back what it was."""
    last = 8 * bits.itemsize - 1
    np.right_shift(bits, last, out=out)
    np.bitwise_and(out, bits.dtype.type(2**last - 1), out=out)
    np.bitwise_xor(out, bits, out=out)
    return out
