"""Reads from a place in a file to the rows of a tensor, which may lie apart.

Straight into their memory, by address: a Python object for each of a thousand rows would cost a tenth of the
read, under the lock that the other threads wait for.
"""

import ctypes
import errno
import os

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_PREADV = getattr(_LIBC, "preadv64", None) or _LIBC.preadv
_PREADV.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_PREADV.restype = ctypes.c_ssize_t

VECTORS_AT_ONCE = 1024
"""Linux takes no more in one call (IOV_MAX)."""


def read_rows(fd: int, out_TW: torch.Tensor, offset: int, *, done: int = 0, upto: int | None = None) -> int:
    """Fill bytes `done` to `upto` of `out_TW`, uint8 [T, W], whose byte 0 lies at `offset` of the file.

    Each row is contiguous, on the host. Returns the end of what is filled: `upto`, all if null, or less where
    the file ends. Raises OSError; nothing says how much was filled then.
    """
    upto = out_TW.numel() if upto is None else upto
    whole_TW = out_TW.view(1, -1) if out_TW.is_contiguous() else out_TW
    width = whole_TW.shape[1]
    while done < upto:
        vectors = _vectors(whole_TW, done, min(upto, done // width * width + VECTORS_AT_ONCE * width))
        count = _preadv(fd, vectors, offset + done)
        if count == 0:
            break
        done += count
    return done


def _vectors(out_TW: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return address and length of what bytes `begin` to `end` of the rows are: int64 [N, 2]."""
    width = out_TW.shape[1]
    first, last = begin // width, (end - 1) // width
    vectors_N2 = torch.empty((last - first + 1, 2), dtype=torch.int64, device="cpu")
    torch.arange(first, last + 1, out=vectors_N2[:, 0])
    vectors_N2[:, 0] *= out_TW.stride(0)
    vectors_N2[:, 0] += out_TW.data_ptr()
    vectors_N2[:, 1] = width
    vectors_N2[-1, 1] = end - last * width
    skipped = begin - first * width
    if skipped:
        vectors_N2[0, 0] += skipped
        vectors_N2[0, 1] -= skipped
    return vectors_N2


def _preadv(fd: int, vectors_N2: torch.Tensor, offset: int) -> int:
    while True:
        count: int = _PREADV(fd, vectors_N2.data_ptr(), len(vectors_N2), offset)
        if count >= 0:
            return count
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
