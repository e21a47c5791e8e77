"""The lossless `planes` encoding of a layer: separates the most significant byte of every element.

For a little-endian element of `w` bytes the high plane holds byte `w - 1` (sign and exponent, which
compress), the low plane bytes `0 .. w - 2` in order (mantissa, which does not).
"""

import numpy as np

from schemas.dataset.memory import Bytes, scratch

_CHUNK_ELEMENTS = 524_288
"""A chunk stays in the cores' caches from the first plane to the second, and takes so long that the threads
of a process seldom meet at its interpreter lock, which they take after every call of numpy.
"""


def split_planes(raw: Bytes, width: int) -> tuple[Bytes, Bytes]:
    """Return the high plane (n bytes) and the low plane (the rest) of the `n * width` bytes of `raw`.

    The low plane overwrites the beginning of `raw`; the high plane is scratch memory of the thread, valid
    until the next call.
    """
    elements = raw.view(f"<u{width}")
    high, low = scratch("high", elements.size), raw[: elements.size * (width - 1)]
    for begin in range(0, elements.size, _CHUNK_ELEMENTS):
        some = elements[begin : begin + _CHUNK_ELEMENTS]
        # A narrowing cast takes the low bits and is vectorized; a strided copy is not.
        np.right_shift(some, 8 * (width - 1), out=high[begin : begin + some.size], casting="unsafe")
        part = low[begin * (width - 1) : (begin + some.size) * (width - 1)]
        if width == 2:
            np.copyto(part, some, casting="unsafe")
        else:
            np.copyto(part.reshape(-1, width - 1), some.view(np.uint8).reshape(-1, width)[:, : width - 1])
    return high, low


def merge_planes(hi: Bytes, lo: Bytes, width: int) -> Bytes:
    """Return the raw bytes that `split_planes` split."""
    raw = np.empty((hi.size, width), dtype=np.uint8)
    raw[:, width - 1] = hi
    raw[:, : width - 1] = lo.reshape(-1, width - 1)
    return raw.reshape(-1)
