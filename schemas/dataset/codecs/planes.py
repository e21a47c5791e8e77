"""The lossless `planes` form of a layer: the most significant byte of every element apart from the rest.

For a little-endian element of `w` bytes the high plane holds byte `w - 1` (sign and exponent, which
compress), the low plane bytes `0 .. w - 2` in order (mantissa, which does not).
"""

import numpy as np

from schemas.dataset.memory import Bytes


def split_planes(raw: Bytes, width: int) -> tuple[Bytes, Bytes]:
    """Return the high plane of `raw`, n bytes of `n * width`, and its low plane, the others."""
    elements = raw.reshape(-1, width)
    return elements[:, width - 1].copy(), elements[:, : width - 1].copy().reshape(-1)


def merge_planes(hi: Bytes, lo: Bytes, width: int) -> Bytes:
    """Return the raw bytes that `split_planes` took apart."""
    raw = np.empty((hi.size, width), dtype=np.uint8)
    raw[:, width - 1] = hi
    raw[:, : width - 1] = lo.reshape(-1, width - 1)
    return raw.reshape(-1)
